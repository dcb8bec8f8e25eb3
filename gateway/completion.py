"""One completion: drives the stream to the target and the one to the draft.

    target --- verdicts ---> [ Coordinator ] --- commits, pace ---> draft
           <-- blocks, pace-               <-- blocks -----------

One task reads the target's stream and one the draft's. Sending a message only queues it, so an
event is handled completely before the next one, without a lock. The draft may be absent, refused,
lost or stalled at any time: the target's stream goes on, and a draft that serves again gets a new
stream, opened with the settled ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from gateway import report
from gateway.debt import Debt, loss_of
from gateway.errors import INTERNAL_ERROR
from gateway.report import AnswerRecord
from gateway.speculation import SpeculationPlan
from gateway.targets import Draft, Pair, follow_first
from gateway.text import AnswerText, Piece, join_pieces
from hippo.errors import (
    HippoError,
    IncompatiblePairError,
    MediaPathError,
    OverloadedError,
    UnavailableError,
)
from hippo.metrics.gateway import DraftLoss
from hippo.rpc.client import DraftStream, TargetStream
from hippo.speculation.coordinator import Action, Coordinator, ToTarget
from hippo.tasks import cancel_all
from hippo.tracing import current_span
from hippo.types import Block, Media, OpenRequest, PromptInfo, Selection, Timing, Verdict

logger = logging.getLogger("gateway.completion")

CopyFiles = Callable[[], Awaitable[tuple[Media, ...]]]

_MAX_DRAFT_ATTEMPTS = 8
_MAX_STALLS = 2  # per answer, because each stall delays the answer by --draft-stall-s
_DRAFT_PAUSE_S = 0.25
_LONGEST_DRAFT_PAUSE_S = 2.0


class Completion:
    """One sequence, from its first message (``Open``) to its last token.

    ``async with`` starts both streams; leaving it cancels them, which frees their slots. ``pairs``
    are tried in order until a target takes the sequence; ``pair`` is the one that has it. Services
    end it ``timeout_s`` after the request's arrival (None: no limit). ``news`` is set when the
    prompt was read, when there is text to take, and at the end; a slow reader delays no stream.
    ``copy_files`` returns the media with the bytes of files that a service cannot open by path.
    """

    def __init__(
        self,
        request: OpenRequest,
        *,
        plan: SpeculationPlan,
        pairs: Sequence[Pair],
        stops: Sequence[str],
        draft_stall_s: float,
        timeout_s: float | None,
        record: AnswerRecord,
        news: asyncio.Event,
        copy_files: CopyFiles,
    ) -> None:
        self._pairs, self.pair = pairs, pairs[0]
        self._wants_draft = plan.wants_draft
        self._first_draft = self.pair.draft if plan.wants_draft else None
        has_draft = self._first_draft is not None
        self._coordinator = Coordinator(
            plan.make_policy(self.pair.target.times(self._first_draft)),
            has_draft=has_draft,
            max_tokens=request.max_tokens,
            end_token_ids=request.end_token_ids,
        )
        self._request = dataclasses.replace(request, pace=self._coordinator.pace)
        self._copy_files, self._timeout_s = copy_files, timeout_s
        self._text = AnswerText(
            self.pair.target.tokenizer,
            stops=stops,
            min_tokens=request.sampling.min_tokens,
            has_logprobs=request.num_top_logprobs is not None,
        )
        self.record = record
        record.stats = self._coordinator.stats
        if plan.wants_draft and not has_draft:
            record.draft_problem = self.pair.target.draft_problem
        self._target_stream: TargetStream | None = None
        self._draft_stream: DraftStream | None = None
        self._draft: Draft | None = None  # the service of _draft_stream, current or last
        self._debt = Debt(draft_stall_s)
        self._num_stalls = 0
        self._begun = asyncio.Event()  # the target has read the prompt, so it has a slot
        self._news = news
        self._pieces: list[Piece] = []  # not yet taken
        self.is_over = False
        self.error: HippoError | None = None  # the error that ended the completion early
        self._task: asyncio.Task[None] | None = None
        self._draft_task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Completion:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._task is not None
        self._task.cancel()
        try:
            await asyncio.gather(self._task, return_exceptions=True)
        finally:
            # The errors' frames refer to this object; without this line, the cycle would keep the
            # request's media in memory until the garbage collector runs.
            self._task = self._draft_task = self.error = None

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the answer so far, including the end token."""
        return list(self._coordinator.committed_ids[: self.record.num_completion_tokens])

    @property
    def finish_reason(self) -> str:
        """The finish reason; the answer must be over."""
        assert self.record.finish_reason is not None
        return self.record.finish_reason.value

    @property
    def reports(self) -> dict[str, Any]:
        """The objects ``hippo`` and ``metrics`` of the answer so far."""
        return {
            "hippo": report.figures(self.record, self._request, self.pair.target.baseline),
            "metrics": report.client_metrics(self.record),
        }

    @property
    def has_begun(self) -> bool:
        """Whether the target has read the prompt."""
        return self._begun.is_set()

    def take_text(self) -> Piece:
        """Returns the text that has settled since the last call, and the events."""
        piece = join_pieces(self._pieces)
        self._pieces.clear()
        events = self.record.events
        return piece if events is None else dataclasses.replace(piece, events=events.take_events())

    async def _run(self) -> None:
        try:
            if self._wants_draft:
                waits = self.pair.target.is_full
                self._draft_task = asyncio.create_task(self._run_draft(self._first_draft, waits))
            await follow_first(
                self._pairs, self._follow_target, self._fall_back_to_bytes, lambda: self.has_begun
            )
        except HippoError as error:
            self.error = error
            if isinstance(error, UnavailableError):
                self.pair.target.report_failure()
        except Exception:
            logger.exception("a completion failed unexpectedly")
            self.error = HippoError(INTERNAL_ERROR)
        finally:
            # Both streams close first: a client that has its answer may ask again at once.
            if self._draft_task is not None:
                await cancel_all([self._draft_task])
            self.is_over = True
            self._news.set()

    async def _follow_target(self, pair: Pair) -> None:
        """Reads the target's stream up to the last verdict; raises HippoError if it ends before."""
        await self._turn_to(pair)
        timeout_s = report.seconds_left(self._timeout_s, self.record.received_ns)
        pace, must_not_wait = self._coordinator.pace, pair.must_not_wait
        request = dataclasses.replace(self._request, pace=pace, must_not_wait=must_not_wait)
        async with pair.target.client.verify(request, timeout_s=timeout_s) as stream:
            self._target_stream = stream
            async for message in stream:
                if isinstance(message, Verdict):
                    await self._on_verdict(message)
                    if self.record.finish_reason is not None:
                        return
                elif isinstance(message, Selection):
                    self.record.add_selection(message, self._request.pruning, time.monotonic_ns())
                    await self._send_message(self._draft_stream, message)
                else:
                    self.record.add_prompt("target", message, time.monotonic_ns())
                    self._begun.set()
                    self._news.set()
                    try:
                        self._check_prompts()
                    except IncompatiblePairError as error:
                        await self._drop_draft(error.message, DraftLoss.INCOMPATIBLE)
        raise UnavailableError("the target service ended the answer before its end")

    async def _turn_to(self, pair: Pair) -> None:
        """Goes on to the next pair, with a draft on its target's host if there is one."""
        self.pair = pair
        nearer = pair.nearer_draft(self._draft) if self._draft_stream is not None else None
        if self._draft_task is not None and nearer is not None:
            self._draft_stream = None
            await cancel_all([self._draft_task])
            self._draft_task = asyncio.create_task(self._run_draft(nearer))

    async def _fall_back_to_bytes(self, error: MediaPathError) -> None:
        """Sends files as bytes from now on, because a service cannot open one of them by its path;
        raises MediaError for files that are too large for a message."""
        logger.warning("files are sent as bytes: %s", error.message)
        self._request = dataclasses.replace(self._request, media=await self._copy_files())

    async def _on_verdict(self, verdict: Verdict) -> None:
        now_ns = time.monotonic_ns()
        is_alone = self._coordinator.pace.max_ahead == 0
        await self._carry_out(self._coordinator.on_verdict(verdict, now_ns))
        piece = self._text.add_verdict(verdict)
        self.record.num_completion_tokens = self._text.num_tokens
        self.record.finish_reason = self._text.finish_reason
        self.record.add_verdict(verdict, now_ns, is_alone=is_alone)
        if piece:
            self._pieces.append(piece)
            self._news.set()
        self._debt.note_owed_block(self._coordinator.owes_block, now_ns)
        if self._debt.is_overdue(now_ns):
            await self._give_up_stalled_draft()

    async def _run_draft(self, draft: Draft | None, waits: bool = False) -> None:
        """Drafts with ``draft`` from the start; if None, joins with the next usable draft. One that
        ``waits`` for a slot of the target leaves the draft's slots to running sequences."""
        joins = draft is None
        if waits:
            await self._begun.wait()
            draft = self.pair.draft or draft
        pause_s = _DRAFT_PAUSE_S
        for _ in range(_MAX_DRAFT_ATTEMPTS):
            draft = draft or await self.pair.wait_draft()
            try:
                await self._draft_with(draft, joins=joins)
            except HippoError as error:
                await self._lose_draft(error.message, loss_of(error))
                if isinstance(error, UnavailableError):
                    draft.report_failure()
                elif isinstance(error, OverloadedError):
                    draft.report_refusal()
                    await self._begun.wait()
                elif isinstance(error, MediaPathError):
                    try:
                        await self._fall_back_to_bytes(error)
                    except HippoError:  # the files are too large for a message
                        return
                else:
                    return
            except Exception as error:  # a bug of the gateway; the answer goes on without the draft
                logger.error("drafting failed", exc_info=error)
                await self._lose_draft("drafting failed in the gateway", DraftLoss.ERROR)
                return
            draft, joins = None, True
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_DRAFT_PAUSE_S)

    async def _draft_with(self, draft: Draft, *, joins: bool) -> None:
        """Reads the draft's stream; raises HippoError when the stream ends or breaks."""
        coordinator = self._coordinator
        ids, epoch = tuple(coordinator.committed_ids), coordinator.epoch
        joins = joins or bool(ids)
        request = dataclasses.replace(
            self._request, pace=coordinator.pace, committed_ids=ids, epoch=epoch
        )
        timeout_s = report.seconds_left(self._timeout_s, self.record.received_ns)
        opened = draft.client.draft(request, timeout_s=timeout_s)
        with draft.count_sequence():
            async with opened as stream:
                self._draft, self._draft_stream = draft, stream
                self.record.num_draft_streams += 1
                if self.record.selection is not None:
                    await self._send_message(stream, self.record.selection)
                if joins:
                    await self._carry_out(coordinator.on_draft_attached(len(ids)))
                async for message in stream:
                    if joins and isinstance(message, PromptInfo):
                        self.record.num_draft_recoveries += 1
                    await self._on_draft_message(message)
        raise UnavailableError("the draft service ended its stream")

    async def _on_draft_message(self, message: PromptInfo | Timing | Block) -> None:
        now_ns = time.monotonic_ns()
        if isinstance(message, PromptInfo):
            self.record.add_prompt("draft", message, now_ns)
            self._check_prompts()
            return
        if isinstance(message, Block):
            self.record.add_block(message, now_ns)
            actions = self._coordinator.on_block(message, now_ns)
        else:
            self.record.add_draft_prefill(message, now_ns)
            actions = self._coordinator.on_draft_ready()
        await self._carry_out(actions)
        self._debt.note_owed_block(self._coordinator.owes_block, now_ns, is_heard=True)

    async def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            stream = self._target_stream if isinstance(action, ToTarget) else self._draft_stream
            await self._send_message(stream, action.message)

    async def _send_message(self, stream: TargetStream | DraftStream | None, message: Any) -> None:
        """Sends a message; if the stream is broken, the task that reads it raises the error."""
        if stream is not None:
            with contextlib.suppress(HippoError):
                await stream.send_message(message)

    def _check_prompts(self) -> None:
        """Raises IncompatiblePairError when the two services read different prompts."""
        target, draft = self.record.target_prompt, self.record.draft_prompt
        if target is not None and draft is not None and target.prompt_hash != draft.prompt_hash:
            raise IncompatiblePairError("the draft read another prompt than the target")

    async def _drop_draft(self, problem: str, cause: DraftLoss) -> None:
        """Goes on without the draft; called by the task that reads the target."""
        if self._draft_task is not None:
            self._draft_task.cancel()
        await self._lose_draft(problem, cause)

    async def _give_up_stalled_draft(self) -> None:
        """Goes on without the draft until a draft is usable again."""
        stalled = self._draft_task
        await self._drop_draft("the draft stalled", DraftLoss.STALLED)
        if self._draft is not None:
            self._draft.report_failure()
        self._num_stalls += 1
        if stalled is not None and self._num_stalls < _MAX_STALLS:
            await asyncio.gather(stalled, return_exceptions=True)
            self._draft_task = asyncio.create_task(self._run_draft(None))

    async def _lose_draft(self, problem: str, cause: DraftLoss) -> None:
        self._draft_stream = None
        self._debt.clear()
        self.record.add_draft_loss(problem, time.monotonic_ns())
        if self._coordinator.has_draft:
            self.record.draft_losses.append(cause)
        current_span().add_event("draft lost", cause=cause.value, problem=problem)
        if self.record.finish_reason is None:
            logger.warning("the answer goes on without the draft: %s", problem)
        await self._carry_out(self._coordinator.on_draft_lost())
