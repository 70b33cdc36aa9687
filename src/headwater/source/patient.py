"""psycopg's connection, whose waits end when the server is found to be unreachable (see `wire.patience`).

psycopg waits in one place, `Connection.wait`, which returns to Python ten times a second while nothing happens.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import psycopg

from headwater.errors import ConnectionLost
from headwater.limits import limit_reached
from headwater.wire.patience import Patience


class WaitEnded(psycopg.OperationalError):
    """An error of psycopg's class, so that code that handles a lost session handles this one too."""


class PatientConnection(psycopg.Connection[tuple[Any, ...]]):
    """Belongs to one thread at a time."""

    patience: Patience | None = None
    longest_seconds: float | None = None
    """Without a byte; None for sessions whose statements may wait for others or work for long."""

    def wait(self, gen: Generator[Any, Any, Any], *arguments: Any, **named: Any) -> Any:
        patience = self.patience
        if patience is None:
            return super().wait(gen, *arguments, **named)
        patience.begin(self.longest_seconds)
        try:
            return super().wait(_watched(gen, patience), *arguments, **named)
        except ConnectionLost as error:
            # In the middle of an exchange of messages the connection cannot be used again.
            self.pgconn.finish()
            raise WaitEnded(error.summary) from error
        except OSError as error:
            limit = limit_reached(error, "waiting for an answer")
            if limit is None:
                raise
            self.pgconn.finish()
            raise WaitEnded(limit.summary) from error


def _watched(gen: Generator[Any, Any, Any], patience: Patience) -> Generator[Any, Any, Any]:
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            if ready:
                patience.heard()
            else:
                patience.check()
            wanted = gen.send(ready)
    except StopIteration as end:
        return end.value
