"""The source of one run: how its server is reached, what it is, and what it publishes for us."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headwater.config.pipeline import PipelineConfig
from headwater.engine.stop import Stop
from headwater.source.server import ServerFacts
from headwater.wire.settings import ConnectSettings

_LONGEST_STATUS_INTERVAL_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Source:
    settings: ConnectSettings
    server: ServerFacts
    publication: str
    most_workers: int
    """How many table sync workers may hold locks at once."""
    messages: bool = False
    """Whether logical messages are asked for as well: the heartbeat's own, and those of others."""

    @classmethod
    def of(cls, config: PipelineConfig, settings: ConnectSettings, server: ServerFacts) -> Source:
        return cls(
            settings,
            server,
            config.publication_name,
            config.max_table_sync_workers,
            messages=config.heartbeat_interval_ms is not None,
        )

    def named(self, application_name: str) -> ConnectSettings:
        return replace(self.settings, application_name=application_name)

    def interrupted_by(self, stop: Stop) -> Source:
        return replace(self, settings=replace(self.settings, interrupt=stop))

    @property
    def locks_for_a_copy(self) -> int:
        """How many relations one table sync worker may lock at a time."""
        return self.server.locks_for(self.most_workers)

    @property
    def status_interval_seconds(self) -> float:
        timeout = self.server.wal_sender_timeout_ms / 1000
        return min(timeout / 3, _LONGEST_STATUS_INTERVAL_SECONDS) if timeout else _LONGEST_STATUS_INTERVAL_SECONDS

    @property
    def silence_seconds(self) -> float:
        """How long the server may say nothing. One that was given more time may take it."""
        return max(self.server.wal_sender_timeout_ms / 1000, self.settings.answer_timeout_seconds)
