"""One service as the gateway sees it: watched, with its load."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from hippo.errors import HippoError, UnavailableError
from hippo.rpc.client import DraftClient, TargetClient
from hippo.types import ModelInfo

logger = logging.getLogger("gateway.backends")

ClientT = TypeVar("ClientT", DraftClient, TargetClient)

_PERIOD_UP_S = 2.0
_PERIOD_DOWN_S = 0.3


class Watch(Generic[ClientT]):
    """Follows one service: whether it serves, what, and how much this gateway asks of it.

    ``info`` is what it serves, None while it does not; ``problem`` says why.
    """

    def __init__(self, noun: str, client: ClientT, *, on_change: Callable[[], None]) -> None:
        self.client: ClientT = client
        self.address = client.address
        self.info: ModelInfo | None = None
        self.num_running = 0  # of this gateway's sequences
        self._name = f"{noun} service at {client.address}"
        self.problem = f"the {self._name} has not answered yet"
        self._on_change = on_change
        self._recheck = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def load(self) -> float:
        """Sequences a slot."""
        return self.num_running / max(self.info.num_slots, 1) if self.info else 0.0

    @contextlib.contextmanager
    def sequence(self) -> Iterator[None]:
        """Counts one for as long as it runs."""
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1

    def start(self) -> None:
        """Begins to watch."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stops watching and closes the connection."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.client.close()

    def report_failure(self) -> None:
        """A stream broke: not used until it is found well again, which is tried at once."""
        self._leave_out(f"the {self._name} has just failed")
        self._recheck.set()

    async def _run(self) -> None:
        while True:
            self._recheck.clear()
            period = _PERIOD_DOWN_S
            try:
                await self._check()
                period = _PERIOD_UP_S
            except UnavailableError as error:
                if self.info is not None:
                    logger.warning("%s", error.message)
                self._leave_out(error.message)
            except Exception as error:
                self._refuse(error)
                period = _PERIOD_UP_S  # only somebody who mends it makes it better
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(period):
                    await self._recheck.wait()
                # A lost service is not asked again at once: its port may still be closing.
                await asyncio.sleep(0.05)

    async def _check(self) -> None:
        """Raises UnavailableError while it is down, and whatever it is that makes one that
        answers of no use."""
        if not await self.client.is_serving():
            raise UnavailableError(f"the {self._name} is down, loading or draining")
        if self.info is None:
            info = await self.client.get_model()
            await self._prepare(info)
            self.info = info
            logger.info("%s serves %s on %s", self._name, info.name, info.device)
            self._on_change()

    async def _prepare(self, info: ModelInfo) -> None:
        """Awaited before a service that came up is known to be there."""

    def _refuse(self, error: Exception) -> None:
        """It answers, but cannot be used: said once, however often it is found."""
        if isinstance(error, HippoError):
            problem, cause = error.message, None
        else:
            reason = str(error) or type(error).__name__
            problem, cause = f"the {self._name} answers, but cannot be used: {reason}", error
        if problem != self.problem:
            logger.error("%s", problem, exc_info=cause)
        self._leave_out(problem)

    def _leave_out(self, problem: str) -> None:
        self.problem = problem
        if self.info is not None:
            self.info = None
            self._on_change()
