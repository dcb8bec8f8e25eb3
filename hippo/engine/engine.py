"""The engine: schedules, runs and postprocesses forwards on the device thread.

    event loop                                 device thread
    submit_sequence, ...    ──── inbox ────►   handle the inbox
                                               pieces of prefills (hippo.engine.fairness)
                                               one forward over all sequences that are ready
    StreamQueue.put_item    ◄──────────────    messages

The thread handles the inbox between pieces of prefills and after each forward, so a closed stream
frees its slot at the next forward boundary. Without work the thread waits for the inbox. Each
sequence's core decides which ids are fed and which messages are sent
(:mod:`hippo.speculation.core`).
"""

import logging
from collections.abc import Callable
from functools import partial
from time import perf_counter_ns
from traceback import clear_frames
from typing import Any, TypeVar

import torch

from hippo.engine.batch import SlowMasks, Work, sample_steps, start_masks
from hippo.engine.bounded import VisionCache
from hippo.engine.device_thread import DeviceThread
from hippo.engine.fairness import PrefillShare
from hippo.engine.jobs import Jobs, mark_on
from hippo.engine.sequence import EngineSequence, Job, Submission
from hippo.engine.stats import EngineCounters
from hippo.engine.warmup import warm_up, warm_up_model
from hippo.errors import HippoError, UnavailableError
from hippo.models.interface.base import Prompt, SequenceRows, StepPlan, VideoLanguageModel
from hippo.models.interface.content import CachedRows
from hippo.speculation.core import PROMPT_STEP, Wait
from hippo.types import Timing

_log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


class Engine:
    """Owns the model from ``start`` to ``stop``, and drives the sequences' prefills and cores.

    If the device fails, all other and all later sequences fail with UnavailableError, and
    ``on_failure`` is called on the event loop.
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
        self.jobs = Jobs(
            self.counters,
            partial(mark_on, self.device),
            capacity=model.info.max_context_length,
        )
        self._share = PrefillShare()
        self._slow_masks = SlowMasks(on_ready=self._thread.wake)
        self._warm_prompt: Prompt | None = None
        self._failure: Exception | None = None

    # --- event loop ---

    def start(self) -> None:
        self._thread.start()

    async def warm_up(self, num_tapped: int) -> None:
        """See :func:`hippo.engine.warmup.warm_up_model`."""
        self._warm_prompt = await warm_up_model(self.model, self.device, self.call, num_tapped)

    async def call(self, function: Callable[[], ResultT]) -> ResultT:
        """See DeviceThread.call."""
        return await self._thread.call(function)

    def submit_sequence(self, sequence: EngineSequence, submission: Submission) -> None:
        """Hands a sequence over to the device thread."""
        self._call_for(sequence, lambda: self._open(sequence, submission))

    def post_message(self, sequence: EngineSequence, message: Any) -> None:
        """Passes a message to a sequence, submitted or not."""
        self._call_for(sequence, lambda: self._take_message(sequence, message))

    def close_sequence(self, sequence: EngineSequence) -> None:
        """Ends a sequence and frees its slot at the next forward boundary."""
        self._call_for(sequence, lambda: self._close(sequence))

    async def stop(self) -> None:
        """Ends all sequences and the thread."""
        await self._thread.stop(
            lambda: self._close_all(UnavailableError("the service is stopping"))
        )

    def _call_for(self, sequence: EngineSequence, function: Callable[[], None]) -> None:
        """Makes the device thread call ``function``, whose exceptions end the sequence."""

        def handle() -> None:
            try:
                function()
            except Exception as error:
                self._fail(sequence, error)

        self._thread.call_soon(handle)

    # --- SequenceHost (device thread) ---

    def emit_message(self, sequence: EngineSequence, message: Any) -> None:
        self._thread.call_on_loop(sequence.output.put_item, message)

    def start_job(self, sequence: EngineSequence, job: Job) -> None:
        self.jobs.add_job(sequence, job, num_tokens=sequence.prompt.length)

    @property
    def is_alone(self) -> bool:
        return len(self._sequences) == 1

    def take_over_rows(
        self, sequence: EngineSequence, rows: CachedRows, *, most: int | None = None
    ) -> int:
        donors = (sequence, *self._sequences) if self._keeps_prefixes else (sequence,)
        limit = len(rows) - 1 if most is None else min(most, len(rows) - 1)

        def reusable(donor: EngineSequence) -> int:
            common = min(rows.common_length(donor.held), limit)
            return self.model.reusable_rows(donor.slot, common)

        best = max(donors, key=reusable)  # of equal ones the first
        num_reused = reusable(best)
        if num_reused and best is not sequence:
            self.model.copy_rows(best.slot, sequence.slot, num_reused)
        sequence.held = rows.first(num_reused)  # an aborted prefill leaves only these rows valid
        return num_reused

    def finish_prefill(
        self,
        sequence: EngineSequence,
        logits: torch.Tensor,
        *,
        rows: CachedRows,
        num_reused: int,
        wait_ns: int = 0,
    ) -> None:
        [(token_ids, notes)] = sample_steps([Work(sequence, PROMPT_STEP)], logits[None])
        sequence.held = rows
        self.counters.count_prefill(len(rows), num_reused, sequence.help)
        self._thread.handle_inbox()
        if sequence.is_closed:
            return
        sequence.ready_ns = sequence.stages.prefill_ended_ns = perf_counter_ns()
        help = sequence.help if sequence.help is not None and sequence.help.num_rows else None
        timing = Timing(
            queue_ns=sequence.began_ns - sequence.submitted_ns,
            forward_ns=sequence.device_ns,
            wait_ns=wait_ns,
            num_rows=len(rows) - num_reused,
            context_length=num_reused,
            vision_ns=sequence.vision_ns,
            helper_ns=0 if help is None else help.helper_ns,
            helper_wait_ns=0 if help is None else help.began_ns - sequence.began_ns,
        )
        if sequence.sends_prefill_timing:
            self.emit_message(sequence, timing)
        sequence.core.begin(token_ids[0], timing, notes)
        self._send_messages(sequence)

    def _send_messages(self, sequence: EngineSequence) -> None:
        for message in sequence.core.take_messages():
            self.emit_message(sequence, message)
        if sequence.core.is_finished:
            self._close(sequence)

    def _close(self, sequence: EngineSequence, error: HippoError | None = None) -> None:
        """Removes the sequence; the event loop then frees its slot."""
        if sequence.is_closed:
            return
        sequence.close()
        self._sequences.pop(sequence, None)
        self.jobs.drop_jobs(sequence)
        self._slow_masks.forget(sequence)
        held = None
        if error is None and self._keeps_prefixes:
            held = sequence.held_at_end(sequence.core.fed_ids)
        # First the slot, so that it is free when the client learns of the end.
        self._thread.call_on_loop(sequence.reservation.release, held)
        self._thread.call_on_loop(sequence.output.close, error)

    # --- the thread ---

    def _turn(self) -> int | None:
        """Runs pieces of prefills and one forward; returns the longest wait for the inbox in ns
        (None: without limit)."""
        has_worked = self._advance_jobs()
        steps, until_ns = self._schedule(perf_counter_ns())
        if steps:
            self._step(steps)
            return 0
        self._share.count_no_forward()
        if has_worked:
            return 0
        return None if until_ns is None else max(until_ns - perf_counter_ns(), 0)

    def _count_idle(self, idle_ns: int) -> None:
        self.counters.idle_ns += idle_ns
        for sequence in self._sequences:
            sequence.wait_ns += idle_ns

    def _open(self, sequence: EngineSequence, submission: Submission) -> None:
        if sequence.is_closed:
            return
        if self._failure is not None:
            raise UnavailableError("the service's device has failed")
        sequence.accept(submission, self.model.info)
        self._sequences[sequence] = None
        self.counters.num_opened += 1
        sequence.begin_prefill(self)

    def _take_message(self, sequence: EngineSequence, message: Any) -> None:
        if not sequence.is_closed:
            sequence.receive_message(self, message)
            self._send_messages(sequence)

    def _schedule(self, now_ns: int) -> tuple[list[Work], int | None]:
        """Returns all steps that are ready, and the earliest end of a timed wait (None: no wait).

        A sequence that waits does not delay others.
        """
        steps: list[Work] = []
        until_ns: int | None = None
        self._slow_masks.begin_forward(self._share.forward_ns)
        for sequence in self._sequences:
            step = self._slow_masks.next_step(sequence, now_ns)
            if isinstance(step, Wait):
                until_ns = step.until_ns if until_ns is None else min(until_ns, step.until_ns)
            elif step is not None:
                steps.append(Work(sequence, step))
        return steps, until_ns

    def _advance_jobs(self) -> bool:
        """Runs pieces of jobs within their share; returns whether there was a job to run."""
        has_worked = self.jobs.next_sequence() is not None
        while (sequence := self.jobs.next_sequence()) is not None:
            if not self._share.allows(sequence.request.client, num_waiting=len(self.jobs)):
                break
            began_ns = perf_counter_ns()
            try:
                self.jobs.advance_job(sequence)
            except Exception as error:
                self._fail(sequence, error)
                self._check_device(error, sequence.slot)
            self._share.count_piece(perf_counter_ns() - began_ns)
            self._thread.handle_inbox()
        return has_worked

    def _step(self, steps: list[Work]) -> None:
        """Runs one forward; after a failure one per sequence, so that only the cause ends."""
        rows = (
            SequenceRows(one.slot, step.start_index, step.token_ids, step.least_start)
            for one, step in steps
        )
        plan = StepPlan(tuple(rows))
        began_ns = perf_counter_ns()
        start_masks(steps)
        try:
            logits = self.model.forward(plan)
            began_ns = max(began_ns, self.jobs.wait_for_device())  # a GPU runs the piece first
            sampled = sample_steps(steps, logits)
        except Exception as error:
            if len(steps) > 1:
                for work in steps:
                    if not work.sequence.is_closed:
                        self._step([work])
                return
            self._fail(steps[0].sequence, error)
            self._check_device(error, steps[0].sequence.slot)
            return
        ended_ns = perf_counter_ns()
        forward_ns, clients = ended_ns - began_ns, [work.sequence.request.client for work in steps]
        self.counters.count_forward(forward_ns, plan.num_rows, len(steps))
        self._thread.handle_inbox()
        num_tokens = 0
        for (sequence, step), (token_ids, notes) in zip(steps, sampled, strict=True):
            if sequence.is_closed:
                continue
            timing = sequence.time_step(step, plan, began_ns=began_ns, ended_ns=ended_ns)
            try:
                num_tokens += sequence.core.finish_step(step, token_ids, timing, notes)
                self._send_messages(sequence)
            except Exception as error:
                self._fail(sequence, error)
        self._share.count_forward(forward_ns, clients, num_tokens)

    def _fail(self, sequence: EngineSequence, error: Exception) -> None:
        if not isinstance(error, HippoError):
            self.counters.num_failed += 1
            extra = {"request_id": sequence.request.request_id}  # not set on this thread
            _log.error("a sequence failed", exc_info=error, extra=extra)
            error = HippoError("the sequence failed inside the service; its log has the details")
        self._close(sequence, error)

    def _check_device(self, error: Exception, slot: int) -> None:
        """Runs a test prefill after a failure in device work, in the failed sequence's ``slot``,
        which no other sequence uses yet; raises if the device has failed."""
        if not isinstance(error, HippoError) and self._warm_prompt is not None:
            clear_frames(error.__traceback__)  # whose tensors may leave too little memory
            warm_up(self.model, self._warm_prompt, slot=slot, max_rows=1)

    def _fail_device(self, error: Exception) -> None:
        _log.critical("the device failed; the service stops serving", exc_info=error)
        self._failure = error
        self._close_all(UnavailableError("the service's device has failed"))
        self._thread.call_on_loop(self._on_failure, error)

    def _close_all(self, error: HippoError) -> None:
        for sequence in list(self._sequences):
            self._close(sequence, error)
