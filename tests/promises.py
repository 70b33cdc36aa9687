"""What Headwater is expected to do, sentence by sentence, with the headings and the order of docs/conformance.md.

A test that shows a sentence carries it: `@pytest.mark.promise("a second start is refused")`. A marker must name a sentence of
this list, and a sentence without a test must be in NOT_SHOWN: `tests/conformance.py` fails otherwise.
"""

from __future__ import annotations

import re
from typing import Final

EXPECTED: dict[str, tuple[str, ...]] = {
    "Start and stop": (
        "a second start is refused",
        "the destination is shut down once",
        "a copy that waits for its result is interrupted by shutdown",
        "buffered writes drain before shutdown",
        "errors caused by shutdown are not recorded",
    ),
    "Copy": (
        "100,000 rows are exact with parallel ranges",
        "empty tables are created",
        "row filters and column lists are honoured in copy and stream",
        "rows written during the copy are neither lost nor doubled",
        "small tables share slot, exported snapshot and job, and each has a state and an error of its own",
        "partitioned roots, nested partitions and single leaves, with and without publish_via_partition_root",
        "the destination fails before, during and after a batch",
        "a result handle is dropped",
    ),
    "Hand-off": (
        "Ready is reached with no traffic at all, by keepalives only",
        "Ready is reached under heavy traffic",
        "the apply worker pauses shortly, and the longest pause is shown",
        "catching up that fails does not stop the apply worker",
        "each state is killed and restarted",
        "no change is lost or doubled, whoever is quicker",
    ),
    "Restart": (
        "after a lost walsender nothing is lost and nothing written twice",
        "after a server restart nothing is lost and nothing written twice",
        "after a killed driver nothing is lost and nothing written twice",
        "a missing slot",
        "an invalidated slot, with each behaviour",
        "stale progress ahead of a new slot is ignored",
    ),
    "Slots": (
        "names that the server does not cut, and one for each worker",
        "missing, invalidated, in use, another cluster, a new timeline, progress ahead: told apart, each with its hint",
        "a pipeline goes on at a promoted standby that synced its slot",
        "a promoted standby that lacks the slot, or what the lake has, is an error",
        "failover slots where they are asked for",
        "a standby as the source",
        "a heartbeat by choice, which writes neither to the lake nor to the store",
    ),
    "Errors": (
        "no retry, manual and timed",
        "the budget of attempts resets on progress",
        "errored tables keep their policy across restarts",
        "rollback to the previous state",
        "full reset",
        "the slot of an errored table is released",
        "a deadline that is missed, and single tables that fail",
        "an internal error of the server is tried a few times, and one that stays ends the run with a hint",
    ),
    "Publication": (
        "tables added and removed while running",
        "tables added and removed while stopped",
        "FOR ALL TABLES",
        "TABLES IN SCHEMA",
    ),
    "Schema": (
        "add, drop, rename and widen columns in the lake",
        "a table whose schema changes ends equal",
        "set and drop default and NOT NULL",
        "several changes in one ALTER, and several in one transaction between rows",
        "DDL with no rows after it",
        "DDL during the copy",
        "replay of all that after a crash gives the same versions",
        "drop and add of the same name",
        "primary key change",
        "table rename",
        "partitioned parent",
    ),
    "Identity": (
        "default, full, using index, nothing",
        "key updates",
        "TOAST unchanged under each",
        "tables without a key",
    ),
    "Truncate": (
        "one, and rows after it",
        "several, cascade, restart identity",
        "between rows of one transaction",
    ),
    "Store": (
        "every lifecycle operation is atomic",
        "progress is monotonic",
        'schema versions by "newest at or before"',
        "pruning keeps the newest at or before the boundary",
        "two pipelines in one store don't see each other",
        "migrations replay to the same schema",
    ),
    "Size": (
        "one row of 64 MiB",
        "a transaction of several million rows",
        "1,000 tables",
        "1,600 columns",
        "names with quotes, spaces, capitals, unicode and 63 bytes",
    ),
    "Servers and connections": (
        "Every major version from 15 to 18: connection, replication, slots, publication, copy, "
        "exported snapshot, and a whole pass of the engine",
        "Each TLS mode, verify-ca and verify-full told apart",
        "Client certificates",
        "SCRAM, md5 and cleartext, and no password in clear text where others read it",
        "Passwords with every odd character",
        "IPv6 and Unix sockets",
        "Several hosts, and a failover between them",
    ),
}

SENTENCES = frozenset(sentence for sentences in EXPECTED.values() for sentence in sentences)

NO_TEST: Final = ""

NOT_SHOWN = {
    "add, drop, rename and widen columns in the lake": "by following DDL; today a changed table is copied again",
    "set and drop default and NOT NULL": NO_TEST,
    "several changes in one ALTER, and several in one transaction between rows": NO_TEST,
    "DDL with no rows after it": NO_TEST,
    "replay of all that after a crash gives the same versions": NO_TEST,
    "drop and add of the same name": NO_TEST,
    "primary key change": NO_TEST,
    "table rename": NO_TEST,
    "partitioned parent": NO_TEST,
    "Several hosts, and a failover between them": (
        "a name with several addresses: it is one server, whichever of them answers first"
    ),
    "Secrets stay secret": "the dashboard",
    "Readers see the old rows or the new ones": "columns and rows that change in one lake commit",
    "Costs stay bounded, and the watermark stays reachable after compaction and expiry": (
        "a commit on day 100 costs what it did on day 1"
    ),
}
"""What no test shows yet: all of a sentence, or the part that is named. Titles of docs/invariants.md may be here too."""


def keyword(sentence: str) -> str:
    """The sentence as one word, for `pytest -k`."""
    return re.sub(r"\W+", "_", sentence).strip("_").lower()
