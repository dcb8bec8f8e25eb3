"""The two services as the gateway sees them: watched, and known to fit together or not."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from tokenizers import Tokenizer

from hippo.errors import HippoError, IncompatiblePairError, UnavailableError
from hippo.pair import check_pair
from hippo.rpc.client import DraftClient, TargetClient
from hippo.types import ModelInfo

logger = logging.getLogger("gateway.backends")

ClientT = TypeVar("ClientT", DraftClient, TargetClient)

_PERIOD_UP_S = 2.0
_PERIOD_DOWN_S = 0.3


class Watch(Generic[ClientT]):
    """Follows one service: whether it serves, and what.

    ``info`` is what it serves, None while it does not; ``problem`` says why.
    """

    def __init__(
        self,
        noun: str,
        client: ClientT,
        *,
        on_change: Callable[[], None],
        prepare: Callable[[ModelInfo], Awaitable[None]] | None = None,
    ) -> None:
        """``prepare`` is awaited before a service that came up is known to be there."""
        self.client: ClientT = client
        self.info: ModelInfo | None = None
        self.problem = f"the {noun} service at {client.address} has not answered yet"
        self._noun = noun
        self._on_change = on_change
        self._prepare = prepare
        self._recheck = asyncio.Event()

    def report_failure(self) -> None:
        """A stream broke: not used until it is found well again, which is tried at once."""
        self.info = None
        self.problem = f"the {self._noun} service at {self.client.address} has just failed"
        self._recheck.set()

    async def run(self) -> None:
        """Watches until cancelled."""
        while True:
            self._recheck.clear()
            await self._check()
            period = _PERIOD_DOWN_S if self.info is None else _PERIOD_UP_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(period):
                    await self._recheck.wait()
                # A lost service is not asked again at once: its port may still be closing.
                await asyncio.sleep(0.05)

    async def _check(self) -> None:
        try:
            if not await self.client.is_serving():
                raise UnavailableError(
                    f"the {self._noun} service at {self.client.address} is down, loading or "
                    "draining"
                )
            if self.info is None:
                info = await self.client.get_model()
                logger.info("%s service serves %s on %s", self._noun, info.name, info.device)
                await self._change(info)
        except HippoError as error:
            if self.info is not None:
                logger.warning("%s", error.message)
            self.problem = error.message
            if self.info is not None:
                await self._change(None)

    async def _change(self, info: ModelInfo | None) -> None:
        if info is not None and self._prepare is not None:
            await self._prepare(info)
        self.info = info
        self._on_change()


class Backends:
    """The target, and the draft if there is one and it fits."""

    def __init__(self, target: TargetClient, draft: DraftClient | None) -> None:
        self._target: Watch[TargetClient] = Watch(
            "target", target, on_change=self._check_pair, prepare=self._load_tokenizer
        )
        self._draft = None if draft is None else Watch("draft", draft, on_change=self._check_pair)
        self._tokenizer: Tokenizer | None = None
        self._pair_problem: str | None = None
        self._draft_usable = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begins to watch; returns at once."""
        self._tasks.append(asyncio.create_task(self._target.run()))
        if self._draft is not None:
            self._tasks.append(asyncio.create_task(self._draft.run()))

    async def close(self) -> None:
        """Stops watching and closes the connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._target.client.close()
        if self._draft is not None:
            await self._draft.client.close()

    @property
    def target(self) -> TargetClient:
        """Where sequences are settled; it may be down."""
        return self._target.client

    @property
    def model(self) -> ModelInfo:
        """What is served. Raises UnavailableError while the target is down."""
        if self._target.info is None:
            raise UnavailableError(self._target.problem)
        return self._target.info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises UnavailableError while the target is down."""
        if self._tokenizer is None:
            raise UnavailableError(self._target.problem)
        return self._tokenizer

    @property
    def draft(self) -> DraftClient | None:
        """A draft that serves and fits the target, or None."""
        usable = self._draft is not None and self._draft_usable.is_set()
        return self._draft.client if self._draft is not None and usable else None

    @property
    def draft_model(self) -> ModelInfo | None:
        """What the draft serves, whether or not it fits."""
        return None if self._draft is None else self._draft.info

    @property
    def draft_problem(self) -> str | None:
        """Why there is no usable draft; None if there is one."""
        if self._draft is None:
            return "no draft service is configured"
        if self._draft_usable.is_set():
            return None
        return self._pair_problem if self._draft.info is not None else self._draft.problem

    async def wait_draft(self) -> DraftClient:
        """Returns a draft as soon as one is usable; for ever without one configured."""
        await self._draft_usable.wait()
        assert self._draft is not None
        return self._draft.client

    def report_draft_failure(self) -> None:
        """A drafting stream broke: the draft is not used until it is found well again."""
        if self._draft is not None:
            self._draft_usable.clear()
            self._draft.report_failure()

    def report_target_failure(self) -> None:
        """A verification stream broke: the target counts as down until it is found well again."""
        self._target.report_failure()

    async def _load_tokenizer(self, info: ModelInfo) -> None:
        # A large one takes a while to build; answers must not wait for it.
        self._tokenizer = await asyncio.to_thread(Tokenizer.from_buffer, info.tokenizer_json)

    def _check_pair(self) -> None:
        draft = None if self._draft is None else self._draft.info
        self._draft_usable.clear()
        if self._target.info is None or draft is None:
            self._pair_problem = self._target.problem
            return
        try:
            check_pair(draft, self._target.info)
        except IncompatiblePairError as error:
            self._pair_problem = error.message
            logger.error("the draft is not used: %s", error.message)
        else:
            self._draft_usable.set()
            if shared := sorted(set(draft.device_uuids) & set(self._target.info.device_uuids)):
                logger.warning(
                    "draft and target run on one GPU (%s): they take turns instead of working at "
                    "once, so most of the gain from running in parallel is lost; give each its own",
                    ", ".join(shared),
                )
