"""One completion: drives the stream to the target and the one to the draft.

    target --- verdicts ---> [ Coordinator ] --- commits, pace ---> draft
           <-- blocks, pace-               <-- blocks -----------

One task reads the target's stream and one the draft's. Sending a message only queues it, so an
event is handled completely before the next one, without a lock. This module has the target's task,
which decides when the answer is over; gateway.answer.drafting has the draft's.
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import Any

from gateway.answer import report
from gateway.answer.drafting import CopyFiles, Drafting, StreamPair
from gateway.answer.plan import SpeculationPlan
from gateway.answer.report import AnswerRecord
from gateway.answer.text import AnswerText, Piece, join_pieces
from gateway.common.errors import INTERNAL_ERROR
from gateway.pairs.targets import Pair, follow_first
from hippo.errors import HippoError, IncompatiblePairError, UnavailableError
from hippo.metrics.gateway import DraftLoss
from hippo.speculation.coordinator import Coordinator
from hippo.types import Hold, OpenRequest, Selection, Verdict

logger = logging.getLogger("gateway.answer.completion")


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
        self._pairs = pairs
        target = pairs[0].target
        self._wants_draft = plan.wants_draft
        self._first_draft = pairs[0].draft if plan.wants_draft else None
        has_draft = self._first_draft is not None
        self._coordinator = Coordinator(
            plan.make_policy(target.times(self._first_draft)),
            has_draft=has_draft,
            max_tokens=request.max_tokens,
            end_token_ids=request.end_token_ids,
        )
        self._text = AnswerText(
            target.token_bytes,
            stops=stops,
            min_tokens=request.sampling.min_tokens,
            has_logprobs=request.num_top_logprobs is not None,
        )
        self.record = record
        record.stats = self._coordinator.stats
        if plan.wants_draft and not has_draft:
            record.draft_problem = target.draft_problem
        self._streams = StreamPair(
            request, self._coordinator, pairs[0], record, copy_files, timeout_s
        )
        self._drafting = Drafting(self._streams, stall_s=draft_stall_s)
        self._news = news
        self._pieces: list[Piece] = []  # not yet taken
        self.is_over = False
        self.error: HippoError | None = None  # the error that ended the completion early
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Completion":
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._task is not None
        self._task.cancel()
        try:
            await asyncio.gather(self._task, return_exceptions=True)
        finally:
            self._task = self.error = None  # as in Drafting.close

    @property
    def pair(self) -> Pair:
        """The pair that has the sequence, or the one that is asked."""
        return self._streams.pair

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
            "hippo": report.figures(self.record, self._streams.request, self.pair.target.baseline),
            "metrics": report.client_metrics(self.record),
        }

    @property
    def has_begun(self) -> bool:
        """Whether the target has read the prompt."""
        return self._streams.begun.is_set()

    def take_text(self) -> Piece:
        """Returns the text that has settled since the last call, and the events."""
        piece = join_pieces(self._pieces)
        self._pieces.clear()
        events = self.record.events
        return piece if events is None else dataclasses.replace(piece, events=events.take_events())

    async def _run(self) -> None:
        try:
            if self._wants_draft:
                self._drafting.start(self._first_draft, waits=self.pair.target.is_full)
            await follow_first(
                self._pairs,
                self._follow_target,
                self._streams.fall_back_to_bytes,
                lambda: self.has_begun,
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
            await self._drafting.close()
            self.is_over = True
            self._news.set()

    async def _follow_target(self, pair: Pair) -> None:
        """Reads the target's stream up to the last verdict; raises HippoError if it ends before."""
        streams = self._streams
        streams.pair = pair
        await self._drafting.turn_to(pair)
        pruning = streams.request.pruning
        if self._wants_draft:
            pruning = dataclasses.replace(pruning, draft_cache_tokens=pair.draft_cache_tokens)
        request = dataclasses.replace(
            streams.request,
            pace=self._coordinator.pace,
            must_not_wait=pair.must_not_wait,
            pruning=pruning,
        )
        opened = pair.target.client.verify(request, timeout_s=streams.seconds_left)
        async with opened as stream:
            streams.target_stream = stream
            async for message in stream:
                if isinstance(message, Verdict):
                    await self._on_verdict(message)
                    if self.record.finish_reason is not None:
                        return
                elif isinstance(message, Hold | Selection):
                    if isinstance(message, Selection):
                        self.record.add_selection(message, request.pruning, time.monotonic_ns())
                    await streams.send_message(streams.draft_stream, message)
                else:
                    self._text.reader.is_thinking = message.is_thinking
                    self.record.add_prompt("target", message, time.monotonic_ns())
                    streams.begun.set()
                    self._news.set()
                    try:
                        streams.check_prompts()
                    except IncompatiblePairError as error:
                        await self._drafting.drop(error.message, DraftLoss.INCOMPATIBLE)
        raise UnavailableError("the target service ended the answer before its end")

    async def _on_verdict(self, verdict: Verdict) -> None:
        now_ns = time.monotonic_ns()
        is_alone = self._coordinator.pace.max_ahead == 0
        await self._streams.carry_out(self._coordinator.on_verdict(verdict, now_ns))
        piece = self._text.add_verdict(verdict)
        self.record.num_completion_tokens = self._text.num_tokens
        self.record.num_thought_tokens = self._text.num_thought_tokens
        self.record.finish_reason = self._text.finish_reason
        self.record.add_verdict(verdict, now_ns, is_alone=is_alone)
        if piece:
            self._pieces.append(piece)
            self._news.set()
        await self._drafting.check_debt(now_ns)
