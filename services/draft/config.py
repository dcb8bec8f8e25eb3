"""The draft service's settings."""

from __future__ import annotations

from dataclasses import dataclass

from hippo.config import setting
from hippo.engine.settings import EngineSettings

ENV_PREFIX = "HIPPO_DRAFT"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSettings(EngineSettings):
    """A draft never queues: without a free slot the target goes alone."""

    port: int = setting(50051, help="port to listen on; 0: any free one")
