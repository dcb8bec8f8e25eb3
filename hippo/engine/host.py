"""Where a service stands: loading, serving, draining or failed; and what it serves with."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hippo.engine.engine import Engine
from hippo.engine.prompts import PromptReader
from hippo.engine.slots import SlotPool
from hippo.engine.stats import EngineStats
from hippo.errors import UnavailableError
from hippo.types import ModelInfo


class HostState(enum.Enum):
    """Why new streams are taken or refused."""

    LOADING = "the service is still loading its model"
    SERVING = "serving"
    DRAINING = "the service is shutting down"
    FAILED = "the service's device has failed"


@dataclass(frozen=True, slots=True)
class Backend:
    """What a loaded service serves with."""

    info: ModelInfo
    engine: Engine
    slots: SlotPool
    prompts: PromptReader


class ServiceHost:
    """Hands the backend to servicers while the service serves; event loop only."""

    def __init__(self) -> None:
        self.state = HostState.LOADING
        self.backend: Backend | None = None
        self._num_streams = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def info(self) -> ModelInfo:
        """What is served; raises UnavailableError until the model is loaded."""
        if self.backend is None:
            raise UnavailableError(self.state.value)
        return self.backend.info

    @contextmanager
    def stream(self) -> Iterator[Backend]:
        """Counts one stream; raises UnavailableError unless the service serves."""
        if self.state is not HostState.SERVING or self.backend is None:
            raise UnavailableError(self.state.value)
        self._num_streams += 1
        self._is_idle.clear()
        try:
            yield self.backend
        finally:
            self._num_streams -= 1
            if self._num_streams == 0:
                self._is_idle.set()

    async def wait_idle(self, timeout: float) -> bool:
        """Waits for the last stream to end; False when ``timeout`` seconds passed before that."""
        try:
            await asyncio.wait_for(self._is_idle.wait(), timeout)
        except TimeoutError:
            return False
        return True

    def stats(self) -> EngineStats | None:
        """None until the model is loaded."""
        if self.backend is None:
            return None
        slots = self.backend.slots
        return EngineStats(
            num_slots=slots.num_slots,
            num_slots_used=slots.num_used,
            num_waiting=slots.num_waiting,
            max_waiting=slots.max_waiting,
            num_streams=self._num_streams,
            counters=self.backend.engine.counters,
            vision_cache=self.backend.engine.vision_cache,
            media_cache=self.backend.prompts.media_cache,
            model=self.backend.info,
        )
