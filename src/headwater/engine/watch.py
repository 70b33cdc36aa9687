"""Looks every few seconds at what may change around a running pipeline: the publication, and states set by a person.

Used by the supervising thread alone. A look reads and writes nothing (invariant 9); only what it finds leads to writes. The
source or the store being away is logged: whoever needs them waits for them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from headwater.engine.run import Run
from headwater.engine.tables import TableSyncPool
from headwater.errors import HeadwaterError
from headwater.schema.table import ReplicaIdentity, TableId
from headwater.source.catalog import load_table_schemas
from headwater.source.membership import Membership, memberships
from headwater.source.publication import PublishedTable, published_tables
from headwater.source.session import Connection, connect, translating
from headwater.states import Phase

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
_NOTICE_SECONDS = 15.0
_PATIENCE_SECONDS = 1.0


class Watch:
    def __init__(self, run: Run, pool: TableSyncPool, members: Mapping[TableId, Membership]) -> None:
        self._run = run
        self._pool = pool
        self._members = dict(members)
        """As the copies that we have rely on."""
        self._connection: Connection | None = None
        self._next = time.monotonic() + LOOK_SECONDS
        self._trouble = ""

    def look_if_due(self) -> None:
        if time.monotonic() < self._next:
            return
        try:
            self._look_at_publication()
            self._look_at_keys()
            self._look_at_states()
            self._trouble = ""
        except HeadwaterError as error:
            self.close()
            if error.message != self._trouble:
                self._trouble = error.message
                log.warning("changes of the publication and of states cannot be seen at the moment: %s", error)
        # From now, not from when it was due: a look that took long must not be followed by the next at once.
        self._next = time.monotonic() + LOOK_SECONDS

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _look_at_states(self) -> None:
        for table_id in self._run.board.changed_outside():
            log.warning("table %s: a new copy was asked for", self._run.board.name(table_id))
            self._pool.copy_again(table_id)

    def _look_at_keys(self) -> None:
        """With identity FULL the stream looks the same when a primary key is dropped or made, but the mirror's key is another
        then (invariant 13): only the catalog tells."""
        copied = {}
        for table_id in self._run.board.in_phase(Phase.READY, Phase.SYNC_DONE):
            schema = self._run.stored_schema(table_id)
            if schema is not None and schema.table_schema.replica_identity is ReplicaIdentity.FULL:
                copied[table_id] = schema.table_schema.primary_key
        if not copied:
            return
        now = load_table_schemas(self._open(), list(copied), self._run.config.publication_name)
        for table_id, key in copied.items():
            if table_id in now and now[table_id].table_schema.primary_key != key:
                log.warning("table %s: its primary key changed, copying it again", self._run.board.name(table_id))
                self._pool.copy_again(table_id)

    def _open(self) -> Connection:
        if self._connection is None or self._connection.closed:
            self._connection = connect(self._run.settings, tcp_user_timeout_seconds=_NOTICE_SECONDS)
            # The server opens every table to say what a publication has, and waits for whoever has one of them for itself;
            # our thread has other things to do meanwhile.
            with translating("setting lock_timeout"):
                self._connection.execute(f"SET lock_timeout = '{round(_PATIENCE_SECONDS * 1000)}ms'")
        return self._connection

    def _found(self, connection: Connection) -> dict[TableId, Membership]:
        members = memberships(connection, self._run.config.publication_name)
        return {table_id: member for table_id, member in members.items() if member.ties}

    def _look_at_publication(self) -> None:
        connection, publication = self._open(), self._run.config.publication_name
        found, known = self._found(connection), self._pool.tables()
        if found == self._members and found.keys() == known.keys():
            return
        # Statement and server function may see two moments of a change, and a copy too many would follow: what two reads say
        # alike is so, and anything else is for the next look.
        if self._found(connection) != found:
            return
        # Read after the members: what changes in between is found as another tie by the next look.
        tables = {table.id: table for table in published_tables(connection, publication)}
        for table_id in [table_id for table_id in known if table_id not in tables]:
            log.warning("table %s left the publication: its lake table is kept", known[table_id].name)
            self._pool.let_go(table_id)
            self._members.pop(table_id, None)
        for table_id, member in found.items():
            if table_id in tables:
                self._compare(tables[table_id], member)

    def _compare(self, table: PublishedTable, member: Membership) -> None:
        if table.id not in self._pool.tables():
            if not self._pool.take_in(table, str(member)):
                return
            log.warning("table %s joined the publication: copying it", table.name)
        else:
            self._pool.refresh(table)
            before = self._members.get(table.id)
            if before is None or not member.continues(before):
                log.warning("table %s: the publication changed around it, copying it again", table.name)
                self._pool.copy_again(table.id, str(member))
        self._members[table.id] = member
