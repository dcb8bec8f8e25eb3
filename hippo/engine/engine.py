"""The device thread: schedule, run, postprocess, and between two forwards look at the inbox.

    event loop                                   device thread
    submit, post, close  ──── inbox ────►  handle what arrived
                                           pieces of prefills (hippo.engine.fairness)
                                           one forward over all sequences that are ready
    StreamQueue.put  ◄──── mailbox ──────  what came of it

The inbox is looked at between layer groups, before a step is scheduled and again when its forward
is over, so a closed stream frees its slot at the next forward boundary. With nothing to do the
thread sleeps in the inbox. What is fed and said next each sequence's core decides
(:mod:`hippo.speculation.core`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from time import perf_counter_ns
from typing import Any, TypeVar

import torch

from hippo.engine.batch import sample_steps
from hippo.engine.bounded import VisionCache
from hippo.engine.device_thread import DeviceThread
from hippo.engine.fairness import prefill_budget_ns
from hippo.engine.jobs import Job, Jobs, mark_on
from hippo.engine.prompts import ReadPrompt
from hippo.engine.sequence import EngineSequence
from hippo.engine.stats import EngineCounters
from hippo.engine.warmup import warm_up, warm_up_model
from hippo.errors import HippoError, UnavailableError
from hippo.models.base import Prompt, SequenceRows, StepPlan, VideoLanguageModel
from hippo.models.content import CachedRows
from hippo.speculation.core import PROMPT_STEP, Step, Wait
from hippo.types import Timing

_log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
Work = tuple[EngineSequence, Step]


class Engine:
    """Owns the model from ``start`` to ``stop``, and drives the sequences' prefills and cores.

    ``on_failure`` is called on the event loop when the device as a whole is of no use any more;
    every sequence has then failed, and later ones fail at once.
    """

    def __init__(
        self,
        model: VideoLanguageModel,
        *,
        on_failure: Callable[[Exception], None],
        vision_cache_bytes: int,
        keeps_prefixes: bool,
    ) -> None:
        self.model = model
        self.counters = EngineCounters()
        self.vision_cache = VisionCache(vision_cache_bytes)
        self._keeps_prefixes = keeps_prefixes
        self.device = torch.device(model.info.device)
        self._on_failure = on_failure
        self._thread = DeviceThread(
            self.device, turn=self._turn, on_error=self._fail_device, on_idle=self._count_idle
        )
        self._sequences: dict[EngineSequence, None] = {}  # an ordered set
        self.jobs = Jobs(self.counters, mark_on(self.device))
        self._num_stepped = 0  # sequences of the last forward; 0: there was nothing to feed
        self._forward_ns = 0  # its duration
        self._tokens_each = 1.0  # that it gave each of them
        self._warm_prompt: Prompt | None = None
        self._failure: Exception | None = None

    # --- event loop ---

    def start(self) -> None:
        self._thread.start()

    async def warm_up(self) -> None:
        """See :func:`hippo.engine.warmup.warm_up_model`."""
        self._warm_prompt = await warm_up_model(self.model, self.device, self.call)

    async def call(self, function: Callable[[], ResultT]) -> ResultT:
        """See DeviceThread.call."""
        return await self._thread.call(function)

    def submit(
        self, sequence: EngineSequence, read: ReadPrompt, slot: int, held: CachedRows
    ) -> None:
        """Hands a sequence over; from here on only the device thread touches it.

        ``held`` is what the slot holds of the sequence before.
        """
        prepare = partial(
            sequence.prepare,
            read,
            slot,
            held,
            submitted_ns=perf_counter_ns(),
            num_token_ids=self.model.info.num_token_ids,
            device=self.device,
        )
        self._put(sequence, lambda: self._open(sequence, prepare))

    def post(self, sequence: EngineSequence, message: Any) -> None:
        """Hands over a message for a sequence, submitted or not."""
        self._put(sequence, lambda: self._take_message(sequence, message))

    def close(self, sequence: EngineSequence) -> None:
        """Ends a sequence and frees its slot at the next forward boundary."""
        self._put(sequence, lambda: self._close(sequence))

    async def stop(self) -> None:
        """Ends all sequences and the thread."""
        await self._thread.stop(
            lambda: self._close_all(UnavailableError("the service is stopping"))
        )

    def _put(self, sequence: EngineSequence, function: Callable[[], None]) -> None:
        """Has the device thread call it; what it raises ends the sequence."""

        def handle() -> None:
            try:
                function()
            except Exception as error:
                self._fail(sequence, error)

        self._thread.put(handle)

    # --- what a prefill uses (device thread) ---

    def emit(self, sequence: EngineSequence, message: Any) -> None:
        """Says something on the sequence's stream."""
        self._thread.post(sequence.output.put, message)

    def start_job(self, sequence: EngineSequence, job: Job) -> None:
        """Queues device work that is done piece by piece, a piece between two forwards."""
        self.jobs.add(sequence, job)

    def take_over(
        self, sequence: EngineSequence, rows: CachedRows, *, most: int | None = None
    ) -> int:
        """A prefill of ``rows`` begins: how many of them its slot holds, at most ``most``.

        Where the slot of another running sequence holds more of them, they are copied first: of
        requests for the same at the same time (the choices of one), one is computed.
        """
        if self._keeps_prefixes:
            limit = len(rows) - 1 if most is None else min(most, len(rows) - 1)
            best = max((sequence, *self._sequences), key=lambda one: rows.common_length(one.held))
            num_held = min(rows.common_length(best.held), limit)
            if num_held > rows.common_length(sequence.held):
                self.model.copy_rows(best.slot, sequence.slot, num_held)
                sequence.held = rows.first(num_held)
        return sequence.take_over(rows, most=most)

    def finish_prefill(
        self,
        sequence: EngineSequence,
        logits: torch.Tensor,
        *,
        rows: CachedRows,
        num_reused: int,
        queue_ns: int,
        wait_ns: int = 0,
    ) -> None:
        """The prefill of ``rows`` gave ``logits`` (of one row): the sequence's core begins."""
        [(token_ids, logprobs)] = sample_steps([(sequence, PROMPT_STEP)], logits[None])
        sequence.held = rows
        self.counters.count_prefill(len(rows), num_reused)
        self._thread.receive()
        if sequence.is_closed:
            return
        sequence.ready_ns = perf_counter_ns()
        timing = Timing(
            queue_ns=queue_ns,
            forward_ns=self.jobs.device_ns(sequence),
            wait_ns=wait_ns,
            num_rows=len(rows) - num_reused,
            context_length=num_reused,
        )
        if sequence.tells_prefill:
            self.emit(sequence, timing)
        sequence.core.begin(token_ids[0], timing, logprobs)
        self._tell(sequence)

    def _tell(self, sequence: EngineSequence) -> None:
        """Says what the core has to say, and closes a sequence that is over."""
        for message in sequence.core.take_messages():
            self.emit(sequence, message)
        if sequence.core.is_finished:
            self._close(sequence)

    def _close(self, sequence: EngineSequence, error: HippoError | None = None) -> None:
        """Forgets the sequence; its slot is free when the event loop hears of it."""
        if sequence.is_closed:
            return
        sequence.is_closed = True
        self._sequences.pop(sequence, None)
        self.counters.num_sequences = len(self._sequences)
        self.jobs.drop(sequence)
        held = None
        if error is None and self._keeps_prefixes:
            held = sequence.held_at_end(sequence.core.fed_ids)
        # First the slot: a client that hears of the end and asks again finds it free.
        self._thread.post(sequence.reservation.release, held)
        self._thread.post(sequence.output.close, error)

    # --- the thread ---

    def _turn(self) -> int | None:
        """Pieces of prefills and one forward; how long to sleep in the inbox afterwards."""
        has_worked = self._advance_jobs()
        steps, until_ns = self._schedule(perf_counter_ns())
        if steps:
            self._step(steps)
            return 0
        self._num_stepped = 0
        if has_worked:
            return 0
        return None if until_ns is None else max(until_ns - perf_counter_ns(), 0)

    def _count_idle(self, idle_ns: int) -> None:
        self.counters.idle_ns += idle_ns
        for sequence in self._sequences:
            sequence.wait_ns += idle_ns

    def _open(self, sequence: EngineSequence, prepare: Callable[[], None]) -> None:
        if sequence.is_closed:
            return
        if self._failure is not None:
            raise UnavailableError("the service's device has failed")
        prepare()
        self._sequences[sequence] = None
        self.counters.num_sequences = len(self._sequences)
        self.counters.num_opened += 1
        sequence.begin(self)

    def _take_message(self, sequence: EngineSequence, message: Any) -> None:
        if not sequence.is_closed:
            sequence.receive(self, message)
            self._tell(sequence)

    def _schedule(self, now_ns: int) -> tuple[list[Work], int | None]:
        """All steps that are ready, and the time to wait until (None: for the inbox alone).

        A sequence that waits holds up no other.
        """
        steps: list[Work] = []
        until_ns: int | None = None
        for sequence in self._sequences:
            step = sequence.core.next_step(now_ns)
            if isinstance(step, Wait):
                until_ns = step.until_ns if until_ns is None else min(until_ns, step.until_ns)
            elif step is not None:
                steps.append((sequence, step))
        return steps, until_ns

    def _advance_jobs(self) -> bool:
        """Runs pieces of the oldest jobs for as long as the running sequences can spare."""
        has_worked = len(self.jobs) > 0
        until_ns = perf_counter_ns() + prefill_budget_ns(
            num_waiting=len(self.jobs),
            num_running=self._num_stepped,
            forward_ns=self._forward_ns,
            tokens_each=self._tokens_each,
        )
        while (sequence := self.jobs.next()) is not None:
            self._advance_job(sequence)
            self._thread.receive()
            if perf_counter_ns() >= until_ns:
                break
        return has_worked

    def _advance_job(self, sequence: EngineSequence) -> None:
        """See Jobs.advance; a failure ends the sequence."""
        try:
            self.jobs.advance(sequence)
        except Exception as error:
            self._fail(sequence, error)
            self._check_device(error, sequence.slot)

    def _step(self, steps: list[Work]) -> None:
        """One forward; if it fails, each sequence alone, so that only the culprit ends."""
        plan = StepPlan(
            tuple(
                SequenceRows(sequence.slot, step.start_index, step.token_ids)
                for sequence, step in steps
            )
        )
        began_ns = perf_counter_ns()
        try:
            logits = self.model.forward(plan)
            began_ns = max(began_ns, self.jobs.settle())  # a GPU begins when the piece is over
            sampled = sample_steps(steps, logits)
        except Exception as error:
            if len(steps) > 1:
                for pair in steps:
                    self._step([pair])
                return
            self._fail(steps[0][0], error)
            self._check_device(error, steps[0][0].slot)
            return
        ended_ns = perf_counter_ns()
        self._forward_ns = ended_ns - began_ns
        self._num_stepped = len(steps)
        self.counters.count_forward(self._forward_ns, plan.num_rows, len(steps))
        self._thread.receive()
        num_tokens = 0
        for (sequence, step), (token_ids, logprobs) in zip(steps, sampled, strict=True):
            if sequence.is_closed:
                continue
            timing = sequence.time_step(step, plan, began_ns=began_ns, ended_ns=ended_ns)
            try:
                num_tokens += sequence.core.finish_step(step, token_ids, timing, logprobs)
                self._tell(sequence)
            except Exception as error:
                self._fail(sequence, error)
        self._tokens_each = num_tokens / len(steps)

    def _fail(self, sequence: EngineSequence, error: Exception) -> None:
        """Ends one sequence by an error; the caller of the service sees it."""
        if not isinstance(error, HippoError):
            self.counters.num_failed += 1
            extra = {"request_id": sequence.request.request_id}  # this is no request's thread
            _log.error("a sequence failed", exc_info=error, extra=extra)
            error = HippoError("the sequence failed inside the service; its log has the details")
        self._close(sequence, error)

    def _check_device(self, error: Exception, slot: int) -> None:
        """After a failure in device work: does the device still work? Raises if not.

        ``slot`` is the failed sequence's: nobody else's until the event loop hears of it.
        """
        if not isinstance(error, HippoError) and self._warm_prompt is not None:
            warm_up(self.model, self._warm_prompt, slot=slot, max_rows=1)

    def _fail_device(self, error: Exception) -> None:
        _log.critical("the device failed; the service stops serving", exc_info=error)
        self._failure = error
        self._close_all(UnavailableError("the service's device has failed"))
        self._thread.post(self._on_failure, error)

    def _close_all(self, error: HippoError) -> None:
        for sequence in list(self._sequences):
            self._close(sequence, error)
