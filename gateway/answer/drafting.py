"""What both streams of a completion share, and the draft's part of it: its stream, and another one
after a loss."""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.answer import report
from gateway.answer.report import AnswerRecord
from gateway.pairs.targets import Draft, Pair
from hippo.base.tasks import cancel_all
from hippo.base.tracing import current_span
from hippo.errors import (
    ContextLengthError,
    HippoError,
    IncompatiblePairError,
    MediaPathError,
    OverloadedError,
    UnavailableError,
)
from hippo.metrics.gateway import DraftLoss
from hippo.rpc.client import DraftStream, TargetStream
from hippo.speculation.coordinator import Action, Coordinator, ToTarget
from hippo.types import Block, Media, OpenRequest, PromptInfo, Timing

logger = logging.getLogger("gateway.answer.completion")

CopyFiles = Callable[[], Awaitable[tuple[Media, ...]]]

_MAX_DRAFT_ATTEMPTS = 8
_MAX_STALLS = 2  # per answer, because each stall delays the answer by the limit
_DRAFT_PAUSE_S = 0.25
_LONGEST_DRAFT_PAUSE_S = 2.0
_LOSSES: dict[type[HippoError], DraftLoss] = {
    OverloadedError: DraftLoss.OVERLOADED,
    UnavailableError: DraftLoss.UNAVAILABLE,
    ContextLengthError: DraftLoss.NO_ROOM,
    IncompatiblePairError: DraftLoss.INCOMPATIBLE,
}
"""Why an answer lost its draft, by the error that ended the draft's stream."""


@dataclass(slots=True)
class StreamPair:
    """The messages of one completion between a target and a draft.

    ``pair`` has the target that is asked. ``target_stream`` and ``draft_stream`` are None before
    they are first opened, ``draft_stream`` also after a loss. ``begun`` is set when the target has
    read the prompt, and so has a slot for it.
    ``copy_files`` returns the media with the bytes of files that a service cannot open by path;
    services end the sequence ``timeout_s`` after the request's arrival (None: no limit).
    """

    request: OpenRequest
    coordinator: Coordinator
    pair: Pair
    record: AnswerRecord
    copy_files: CopyFiles
    timeout_s: float | None
    target_stream: TargetStream | None = None
    draft_stream: DraftStream | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until a service ends the sequence; None: no limit."""
        return report.seconds_left(self.timeout_s, self.record.received_ns)

    async def carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            stream = self.target_stream if isinstance(action, ToTarget) else self.draft_stream
            await self.send_message(stream, action.message)

    async def send_message(self, stream: TargetStream | DraftStream | None, message: Any) -> None:
        """Sends a message; if the stream is broken, the task that reads it raises the error."""
        if stream is not None:
            with contextlib.suppress(HippoError):
                await stream.send_message(message)

    async def fall_back_to_bytes(self, error: MediaPathError) -> None:
        """Sends files as bytes from now on, because a service cannot open one of them by its path;
        raises MediaError for files that are too large for a message."""
        logger.warning("files are sent as bytes: %s", error.message)
        self.request = dataclasses.replace(self.request, media=await self.copy_files())

    def check_prompts(self) -> None:
        """Raises IncompatiblePairError when the two services read different prompts."""
        target, draft = self.record.target_prompt, self.record.draft_prompt
        if target is not None and draft is not None and target.prompt_hash != draft.prompt_hash:
            raise IncompatiblePairError("the draft read another prompt than the target")


class Drafting:
    """The drafts of one completion, one at a time.

    The draft may be refused, lost or stalled at any time: the target goes on, and the next usable
    draft gets a stream that is opened with the settled ids, a limited number of times. A draft that
    owes a block and is silent for ``stall_s`` has stalled.
    """

    def __init__(self, streams: StreamPair, *, stall_s: float) -> None:
        self._streams = streams
        self._coordinator = streams.coordinator
        self._record = streams.record
        self._stall_ns = int(stall_s * 1e9)
        self._owes_since_ns: int | None = None  # the draft owes a block and is silent
        self._num_stalls = 0
        self._draft: Draft | None = None  # the service of the stream, current or last
        self._task: asyncio.Task[None] | None = None

    def start(self, draft: Draft | None, *, waits: bool = False) -> None:
        """Drafts with ``draft`` from the start; if None, joins with the next usable draft. One that
        ``waits`` for a slot of the target leaves the draft's slots to running sequences."""
        self._task = asyncio.create_task(self._run(draft, waits))

    async def close(self) -> None:
        """Closes the stream; no draft joins any more."""
        if self._task is None:
            return
        try:
            await cancel_all([self._task])
        finally:
            # The errors' frames refer to this object; without this line, the cycle would keep the
            # request's media in memory until the garbage collector runs.
            self._task = None

    async def turn_to(self, pair: Pair) -> None:
        """Goes on with a draft on the host of the pair's target, if there is one."""
        if self._task is None or self._streams.draft_stream is None:
            return
        nearer = pair.nearer_draft(self._draft)
        if nearer is not None:
            self._streams.draft_stream = None
            await cancel_all([self._task])
            self.start(nearer)

    async def drop(self, problem: str, cause: DraftLoss) -> None:
        """Goes on without a draft; called by the task that reads the target."""
        if self._task is not None:
            self._task.cancel()
        await self._lose(problem, cause)

    async def check_debt(self, now_ns: int) -> None:
        """After a verdict: gives up a draft that has stalled."""
        self._note_debt(now_ns, is_heard=False)
        if self._owes_since_ns is None or now_ns - self._owes_since_ns <= self._stall_ns:
            return
        stalled = self._task
        await self.drop("the draft stalled", DraftLoss.STALLED)
        if self._draft is not None:
            self._draft.report_failure()
        self._num_stalls += 1
        if stalled is not None and self._num_stalls < _MAX_STALLS:
            await asyncio.gather(stalled, return_exceptions=True)
            self.start(None)

    async def _run(self, draft: Draft | None, waits: bool) -> None:
        joins = draft is None
        if waits:
            await self._streams.begun.wait()
            draft = self._streams.pair.draft or draft
        pause_s = _DRAFT_PAUSE_S
        for _ in range(_MAX_DRAFT_ATTEMPTS):
            draft = draft or await self._streams.pair.wait_draft()
            try:
                await self._draft_with(draft, joins=joins)
            except HippoError as error:
                causes = (loss for kind, loss in _LOSSES.items() if isinstance(error, kind))
                await self._lose(error.message, next(causes, DraftLoss.ERROR))
                if isinstance(error, UnavailableError):
                    draft.report_failure()
                elif isinstance(error, OverloadedError):
                    draft.report_refusal()
                    await self._streams.begun.wait()
                elif isinstance(error, MediaPathError):
                    try:
                        await self._streams.fall_back_to_bytes(error)
                    except HippoError:  # the files are too large for a message
                        return
                else:
                    return
            except Exception as error:  # a bug of the gateway; the answer goes on without the draft
                logger.error("drafting failed", exc_info=error)
                await self._lose("drafting failed in the gateway", DraftLoss.ERROR)
                return
            draft, joins = None, True
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_DRAFT_PAUSE_S)

    async def _draft_with(self, draft: Draft, *, joins: bool) -> None:
        """Reads the draft's stream; raises HippoError when the stream ends or breaks."""
        streams, coordinator = self._streams, self._coordinator
        ids, epoch = tuple(coordinator.committed_ids), coordinator.epoch
        joins = joins or bool(ids)
        request = dataclasses.replace(
            streams.request, pace=coordinator.pace, committed_ids=ids, epoch=epoch
        )
        opened = draft.client.draft(request, timeout_s=streams.seconds_left)
        with draft.count_sequence():
            async with opened as stream:
                self._draft, streams.draft_stream = draft, stream
                self._record.num_draft_streams += 1
                if self._record.selection is not None:
                    await streams.send_message(stream, self._record.selection)
                if joins:
                    await streams.carry_out(coordinator.on_draft_attached(len(ids)))
                async for message in stream:
                    if joins and isinstance(message, PromptInfo):
                        self._record.num_draft_recoveries += 1
                    await self._on_message(message)
        raise UnavailableError("the draft service ended its stream")

    async def _on_message(self, message: PromptInfo | Timing | Block) -> None:
        now_ns = time.monotonic_ns()
        if isinstance(message, PromptInfo):
            self._record.add_prompt("draft", message, now_ns)
            self._streams.check_prompts()
            return
        if isinstance(message, Block):
            self._record.add_block(message, now_ns)
            actions = self._coordinator.on_block(message, now_ns)
        else:
            self._record.add_draft_prefill(message, now_ns)
            actions = self._coordinator.on_draft_ready()
        await self._streams.carry_out(actions)
        self._note_debt(now_ns, is_heard=True)

    def _note_debt(self, now_ns: int, *, is_heard: bool) -> None:
        """Updates since when the draft owes a block; ``is_heard``: it has just sent a message."""
        if not self._coordinator.owes_block:
            self._owes_since_ns = None
        elif is_heard or self._owes_since_ns is None:
            self._owes_since_ns = now_ns

    async def _lose(self, problem: str, cause: DraftLoss) -> None:
        self._streams.draft_stream = None
        self._owes_since_ns = None
        self._record.add_draft_loss(problem, time.monotonic_ns())
        if self._coordinator.has_draft:
            self._record.draft_losses.append(cause)
        current_span().add_event("draft lost", cause=cause.value, problem=problem)
        if self._record.finish_reason is None:
            logger.warning("the answer goes on without the draft: %s", problem)
        await self._streams.carry_out(self._coordinator.on_draft_lost())
