"""Watches the health and the load of one service."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from hippo.base.tasks import cancel_all
from hippo.errors import HippoError, UnavailableError
from hippo.rpc.client import DraftClient, TargetClient
from hippo.types import ModelInfo

logger = logging.getLogger("gateway.pairs.backends")

ClientT = TypeVar("ClientT", DraftClient, TargetClient)

_FULL_S = 0.5  # for so long a service that refused a sequence counts as full
_PERIOD_UP_S = 2.0
_PERIOD_DOWN_S = 0.3


class Watch(Generic[ClientT]):
    """Watches one service, and counts the sequences that this gateway runs there.

    ``info`` is the served model, None while the service cannot be used; ``problem`` says why.
    """

    def __init__(self, noun: str, client: ClientT, *, on_change: Callable[[], None]) -> None:
        self.client: ClientT = client
        self.address = client.address
        self.host = client.address.rpartition(":")[0]
        self.info: ModelInfo | None = None
        self.num_running = 0  # this gateway's sequences
        self._name = f"{noun} service at {client.address}"
        self.problem = f"the {self._name} has not answered yet"
        self._full_until_s = 0.0  # on the clock time.monotonic
        self._on_change = on_change
        self._recheck = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def load(self) -> float:
        """Running sequences of this gateway per slot."""
        return self.num_running / max(self.info.num_slots, 1) if self.info else 0.0

    @property
    def is_full(self) -> bool:
        """Whether this gateway's sequences fill all slots, or the service has just refused one."""
        return self.load >= 1 or time.monotonic() < self._full_until_s

    @contextlib.contextmanager
    def count_sequence(self) -> Iterator[None]:
        """Counts a sequence as running for the time of the ``with`` block."""
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            await cancel_all([self._task])
        await self.client.close()

    def report_refusal(self) -> None:
        """Reports that the service had no free slot: other gateways use the service too."""
        self._full_until_s = time.monotonic() + _FULL_S

    def report_failure(self) -> None:
        """Reports a broken stream: the service is checked at once, and unused until it serves."""
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
                period = _PERIOD_UP_S  # an operator has to fix the service
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(period):
                    await self._recheck.wait()
                # A lost service is not asked again at once: its port may still be closing.
                await asyncio.sleep(0.05)

    async def _check(self) -> None:
        """Raises UnavailableError while the service is down, and other errors if it is unusable."""
        if reason := await self.client.health_problem():
            raise UnavailableError(f"the {self._name} is down, loading or draining: {reason}")
        if self.info is None:
            info = await self.client.get_model()
            await self._prepare(info)
            self.info = info
            logger.info("%s serves %s on %s", self._name, info.name, info.device)
            self._on_change()

    async def _prepare(self, info: ModelInfo) -> None:
        """Prepares for a service that came up, before ``info`` is set; for subclasses."""

    def _refuse(self, error: Exception) -> None:
        """Leaves out a service that answers but cannot be used; logs each problem once."""
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
