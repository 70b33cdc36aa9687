"""The lists of docs/architecture.md: which files a copied row and a streamed UPDATE go through, in order.

`python -m tests.walks.page docs/architecture.md` writes each file's description again, from its docstring; with
`--record` it runs both walks and writes new lists, for which it starts a Postgres server and Spark.
"""

from __future__ import annotations

import argparse
import ast
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from headwater.testing.postgres import PostgresServer
from tests.conftest import Database
from tests.walks.record import COPY, SPARK_WORKER, UPDATE, Called, record

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "headwater"


@dataclass(frozen=True, slots=True)
class Leg:
    """What one kind of thread does for the row. A file is listed where the row meets it first."""

    thread: str
    """A regular expression, which the whole name has to match."""
    does: str


LEGS = {
    COPY: (
        Leg("headwater-tables", "compares the publication with the states, and starts a worker for the new table"),
        Leg(
            "headwater-sync-.*",
            "locks the table, creates a slot with its snapshot, plans the copy, and follows the slot",
        ),
        Leg("headwater-wait-headwater_sync_.*", "watches the creation of the slot"),
        Leg("headwater-copy-.*", "is the destination's call: one Spark job, and one lake commit"),
        Leg(SPARK_WORKER, "read the row by COPY, at the snapshot of the slot, and make Arrow columns of it"),
        Leg("headwater-read-headwater_sync_.*", "reads the slot of the copy, and answers the server"),
        Leg("headwater-apply", "answers the worker with a position, and takes the table over"),
        Leg("headwater-read-headwater_apply_.*", "reads the pipeline's slot, and answers the server"),
    ),
    UPDATE: (
        Leg("headwater-read-headwater_apply_.*", "reads the socket, and sends what is confirmed"),
        Leg("headwater-apply", "decodes, cuts a batch, and hands it over; then records the position and confirms it"),
        Leg("headwater-write", "calls the destination"),
        Leg("headwater-lake-batch_.*", "writes the tables of a batch side by side, and sums up"),
        Leg("headwater-lake-table_.*", "writes the changes of one table: one MERGE, and one lake commit"),
    ),
}
BY_THE_CLOCK = {
    COPY: "headwater-(memory|heartbeat|lock|jvm|display|pipeline-.*|standard-.*)",
    UPDATE: "headwater-(memory|heartbeat|lock|jvm|display|pipeline-.*|standard-.*|tables)",
}
"""Threads that do the same at the same times whether the row comes or not: they are no part of its walk."""


class StrangeThread(Exception):
    """A thread executes functions of Headwater, and is in neither list above."""


def files_of(walk: str, calls: Iterable[Called]) -> list[tuple[Leg, list[str]]]:
    """The modules of each leg, each module once."""
    by_leg: dict[Leg, list[str]] = {leg: [] for leg in LEGS[walk]}
    for call in calls:
        if re.fullmatch(BY_THE_CLOCK[walk], call.thread):
            continue
        leg = next((leg for leg in LEGS[walk] if re.fullmatch(leg.thread, call.thread)), None)
        if leg is None:
            raise StrangeThread(f"{call.thread} ({call.module}: {call.function})")
        by_leg[leg].append(call.module)
    seen: set[str] = set()
    result = []
    for leg, modules in by_leg.items():
        new = [module for module in dict.fromkeys(modules) if module not in seen]
        seen.update(new)
        result.append((leg, new))
    return result


def listed(document: str, walk: str) -> list[str]:
    """The modules in the list of the document."""
    return _modules(_cut(document, walk)[1])


def write(document: str, walk: str, legs: list[tuple[Leg, list[str]]]) -> str:
    before, _, after = _cut(document, walk)
    return before + "\n" + "\n".join(_lines(legs)) + "\n\n" + after


def describe(document: str) -> str:
    """The document with each file's description as its docstring has it now, and with the number of files."""
    for walk in LEGS:
        _, section, _ = _cut(document, walk)
        legs = [(leg, _listed_in(leg, section)) for leg in LEGS[walk]]
        document = write(document, walk, legs)
    return document


def _listed_in(leg: Leg, section: str) -> list[str]:
    found = re.search(rf"^\d+\. {re.escape(_heading(leg))}\n((?:   - .*\n)*)", section, re.M)
    return _modules(found[1]) if found else []


def _modules(lines: str) -> list[str]:
    return re.findall(r"^   - \[`([^`]+)`\]", lines, re.M)


def _lines(legs: list[tuple[Leg, list[str]]]) -> Iterator[str]:
    yield f"{sum(len(modules) for _, modules in legs)} files."
    yield ""
    for number, (leg, modules) in enumerate(legs, 1):
        yield f"{number}. {_heading(leg)}"
        for module in modules:
            yield f"   - [`{module}`](../src/headwater/{module}): {_description(module)}"


def _heading(leg: Leg) -> str:
    name = leg.thread.replace(".*", "...")
    return f"**{name if leg.thread == SPARK_WORKER else f'`{name}`'}** {leg.does}"


def _description(module: str) -> str:
    """The first sentence of its docstring."""
    docstring = ast.get_docstring(ast.parse((SOURCE / module).read_text(encoding="utf-8"))) or ""
    opening = " ".join(docstring.partition("\n\n")[0].split())
    return re.split(r"(?<!\.)\.(?: |$)", opening, maxsplit=1)[0]


def _cut(document: str, walk: str) -> tuple[str, str, str]:
    """What is before the list, the list, and what is after it; the marks belong to what is around it."""
    begin, end = f"<!-- {walk}: generated, see tests/walks -->\n", f"<!-- end of {walk} -->"
    before, found, rest = document.partition(begin)
    section, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"the document lacks the marks {begin.strip()} and {end}")
    return before + begin, section, end + after


def record_both() -> Mapping[str, list[Called]]:
    with PostgresServer.start() as server, tempfile.TemporaryDirectory() as directory:
        name = server.create_database()
        with server.connect(name) as connection:
            return record(Database(server, name, connection), Path(directory))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.walks.page")
    parser.add_argument("page", type=Path)
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    document = arguments.page.read_text(encoding="utf-8")
    if arguments.record:
        for walk, calls in record_both().items():
            document = write(document, walk, files_of(walk, calls))
    arguments.page.write_text(describe(document), encoding="utf-8")


if __name__ == "__main__":
    main()
