"""The target service's settings."""

from __future__ import annotations

from dataclasses import dataclass

from hippo.config import SettingsError, setting
from hippo.engine.settings import EngineSettings

ENV_PREFIX = "HIPPO_TARGET"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSettings(EngineSettings):
    """What a target has besides: a queue for its slots."""

    port: int = setting(50052, help="port to listen on; 0: any free one")
    max_queue: int = setting(16, help="sequences that may wait for a slot")

    def __post_init__(self) -> None:
        EngineSettings.__post_init__(self)
        if self.max_queue < 0:
            raise SettingsError(f"--max-queue is {self.max_queue}; it must not be below 0")
