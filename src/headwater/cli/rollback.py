"""`headwater rollback`: a table that stopped with an error goes back to Init, and is copied again.

Its changes were dropped from the error on, so whatever state it had before, the only one it may go back to is Init, which
leads to a new copy (invariant 15). The store's own rollback is not used: it would record Ready for a moment, and a
pipeline that is started in that moment would continue with a gap.
"""

from __future__ import annotations

from pathlib import Path

import click

from headwater.cli.control import controlled
from headwater.cli.say import say
from headwater.errors import StateError
from headwater.states import Phase, to_be_copied


@click.command()
@click.argument("settings_file", type=click.Path(path_type=Path))
@click.argument("table")
def rollback(settings_file: Path, table: str) -> None:
    """Retry TABLE, written namespace.name, after the cause of its error was removed.

    The table is copied again: at once if the pipeline runs, else at its next start. Its attempts are counted from zero.
    """
    with controlled(settings_file, "rollback") as pipeline:
        loaded = pipeline.load()
        known = pipeline.published()
        if table not in known:
            raise pipeline.unknown([table], known)
        state = pipeline.store.get_table_state(known[table]) if loaded else None
        if state is None or state.phase is not Phase.ERRORED:
            raise StateError(
                f"table {table} did not stop with an error",
                detail=f"its state is {state}" if state is not None else "the pipeline has no state of it yet",
                hint=f"To copy it again anyway: {pipeline.command('resync', table)}",
            )
        # An older version may have made the store, with fewer tables.
        pipeline.store.start()
        pipeline.store.update_table_state(known[table], to_be_copied(state))
        say(f"{table} goes back to init: it is copied again {pipeline.when()}")
