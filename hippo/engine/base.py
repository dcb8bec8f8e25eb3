"""The device thread: schedule, run, postprocess, and between two forwards look at the inbox.

    event loop                                   device thread
    submit, post, close  ──── inbox ────►  handle what arrived
                                           pieces of prefills (hippo.engine.fairness)
                                           one forward over all sequences that are ready
    StreamQueue.put  ◄──── mailbox ──────  what came of it

The inbox is looked at between layer groups, before a step is scheduled and again when its forward
is over, so a closed stream frees its slot at the next forward boundary. With nothing to do the
thread sleeps in the inbox.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any, Generic, Protocol, TypeVar

import torch

from hippo.engine.cpu import compute_alone, name_thread, set_threads_here
from hippo.engine.fairness import prefill_budget_ns
from hippo.engine.jobs import Job, Jobs, mark_on
from hippo.engine.mailbox import LoopMailbox, settle
from hippo.engine.prompts import ReadPrompt
from hippo.engine.sequence import EngineSequence
from hippo.engine.settings import NO_REUSE, ReuseOptions
from hippo.engine.stats import EngineCounters
from hippo.engine.vision_cache import VisionCache
from hippo.engine.warmup import warm_prompt, warm_up
from hippo.errors import HippoError, ModelLoadError, UnavailableError
from hippo.models.base import Prompt, SequenceRows, StepPlan, VideoLanguageModel
from hippo.models.content import CachedRows
from hippo.models.family import CachedModel

_LONGEST_SLEEP_NS = 3600 * 10**9  # of a wait that a client may have asked to last for ages
_log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
SequenceT = TypeVar("SequenceT", bound=EngineSequence)


class Step(Protocol):
    """Rows that a core wants to be fed."""

    @property
    def start_index(self) -> int: ...
    @property
    def token_ids(self) -> tuple[int, ...]: ...


StepT = TypeVar("StepT", bound=Step)
Item = tuple[Callable[[Any, Any], None], Any, Any]


class Engine(ABC, Generic[SequenceT, StepT]):
    """Owns the model from ``start`` to ``stop``; subclasses say what a sequence wants next.

    ``on_failure`` is called on the event loop when the device as a whole is of no use any more;
    every sequence has then failed, and later ones fail at once.
    """

    def __init__(
        self,
        model: VideoLanguageModel,
        *,
        on_failure: Callable[[Exception], None],
        reuse: ReuseOptions = NO_REUSE,
    ) -> None:
        self.model = model
        self.counters = EngineCounters()
        self.vision_cache = VisionCache(reuse.vision_cache_bytes)
        self._keeps_prefixes = reuse.keeps_prefixes
        self._device = torch.device(model.info.device)
        self._on_failure = on_failure
        self._inbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._mailbox = LoopMailbox(asyncio.get_running_loop())
        self._num_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="device")
        self._sequences: dict[SequenceT, None] = {}  # an ordered set
        self._jobs: Jobs[SequenceT] = Jobs(self.counters, mark_on(self._device))
        self._num_stepped = 0  # sequences of the last forward; 0: there was nothing to feed
        self._num_stepped_rows = 0  # of them all
        self._forward_ns = 0  # its duration
        self._tokens_each = 1.0  # that it gave each of them
        self._warm_prompt: Prompt | None = None
        self._is_stopping = False
        self._failure: Exception | None = None

    # --- event loop ---

    def start(self) -> None:
        self._thread.start()

    async def warm_up(self) -> None:
        """Runs a prompt with a video and forwards of 1 row to many.

        Raises ModelLoadError when the model cannot do that.
        """
        prompt = self._warm_prompt = await asyncio.to_thread(self._prepare_warm_prompt)
        try:
            if isinstance(self.model, CachedModel):
                capturing = self.model.capture_steps()
                while await self.call(partial(next, capturing, 0)):
                    pass
            await self.call(partial(warm_up, self.model, prompt, slot=0))
        except HippoError:
            raise
        except Exception as error:
            _log.error("the first forwards failed", exc_info=error)
            raise ModelLoadError(
                f"the model is loaded, but its first forwards fail: {error}"
            ) from error

    async def call(self, function: Callable[[], ResultT]) -> ResultT:
        """Runs it on the device thread, between two forwards; what it raises is raised here.

        From ``start`` to ``stop``: at other times nobody answers.
        """
        done: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self._inbox.put((self._handle_call, function, done))
        return await done

    def _prepare_warm_prompt(self) -> Prompt:
        if self._device.type == "cpu":
            compute_alone()
        return warm_prompt(self.model)

    def submit(self, sequence: SequenceT, read: ReadPrompt, slot: int, held: CachedRows) -> None:
        """Hands a sequence over; from here on only the device thread touches it.

        ``held`` is what the slot holds of the sequence before.
        """
        self._inbox.put((self._handle_submit, sequence, (read, slot, held, perf_counter_ns())))

    def post(self, sequence: SequenceT, message: Any) -> None:
        """Hands over a message for a sequence, submitted or not."""
        self._inbox.put((self._handle_message, sequence, message))

    def close(self, sequence: SequenceT) -> None:
        """Ends a sequence and frees its slot at the next forward boundary."""
        self._inbox.put((self._handle_close, sequence, None))

    async def stop(self) -> None:
        """Ends all sequences and the thread."""
        if not self._thread.is_alive():
            return
        done: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self._inbox.put((self._handle_stop, None, done))
        await done
        self._thread.join()

    # --- what a subclass says (device thread) ---

    @abstractmethod
    def _begin(self, sequence: SequenceT) -> None:
        """A sequence has a prompt and a slot now: start its first job."""

    @abstractmethod
    def _take_message(self, sequence: SequenceT, message: Any) -> None:
        """A message arrived; raises HippoError for one that breaks the rules."""

    @abstractmethod
    def _schedule(self, now_ns: int) -> tuple[list[tuple[SequenceT, StepT]], int | None]:
        """All steps that are ready, or the time to wait until (None: for the inbox alone)."""

    @abstractmethod
    def _sample(
        self, steps: Sequence[tuple[SequenceT, StepT]], logits: torch.Tensor
    ) -> list[list[int]]:
        """Tokens of each step; the one wait for the device."""

    @abstractmethod
    def _finish(
        self, sequence: SequenceT, step: StepT, token_ids: list[int], began_ns: int, ended_ns: int
    ) -> int:
        """Takes a step's tokens and emits what follows from them; how many came of it."""

    @abstractmethod
    def _fed_ids(self, sequence: SequenceT) -> Sequence[int]:
        """The leading completion ids whose keys and values the slot holds, at a forward boundary
        and whatever a forward in progress may have left behind them."""

    # --- what a subclass uses (device thread) ---

    def _emit(self, sequence: SequenceT, message: Any) -> None:
        self._mailbox.post(sequence.output.put, message)

    def _start_job(self, sequence: SequenceT, job: Job) -> None:
        """Queues device work that is done piece by piece, a piece between two forwards."""
        self._jobs.add(sequence, job)

    def _take_over(self, sequence: SequenceT, rows: CachedRows, *, most: int | None = None) -> int:
        """A prefill of ``rows`` begins: how many of them its slot holds, at most ``most``.

        Where the slot of another running sequence holds more of them, they are copied first: of
        requests for the same at the same time (the choices of one), one is computed.
        """
        if self._keeps_prefixes:
            limit = len(rows) - 1 if most is None else min(most, len(rows) - 1)
            best, num_held = None, min(rows.common_length(sequence.held), limit)
            for other in self._sequences:
                num_common = min(rows.common_length(other.held), limit)
                if num_common > num_held:
                    best, num_held = other, num_common
            if best is not None:
                self.model.copy_rows(best.slot, sequence.slot, num_held)
                sequence.held = rows.first(num_held)
        return sequence.take_over(rows, most=most)

    def _close(self, sequence: SequenceT, error: HippoError | None = None) -> None:
        """Forgets the sequence; its slot is free when the event loop hears of it."""
        if sequence.is_closed:
            return
        sequence.is_closed = True
        self._sequences.pop(sequence, None)
        self.counters.num_sequences = len(self._sequences)
        self._jobs.drop(sequence)
        held = None
        if error is None and self._keeps_prefixes:
            held = sequence.held_at_end(self._fed_ids(sequence))
        # First the slot: whoever hears of the end and asks again finds it free.
        self._mailbox.post(sequence.reservation.release, held)
        self._mailbox.post(sequence.output.close, error)

    # --- the thread ---

    def _run(self) -> None:
        name_thread("device")
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a thread begins on the first one
        set_threads_here(self._num_threads)
        while not self._is_stopping:
            try:
                delay_ns = self._turn()
            except Exception as error:
                self._fail_device(error)
                delay_ns = None
            self._receive(delay_ns)

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

    def _receive(self, delay_ns: int | None) -> None:
        """Handles all that arrived; with an empty inbox sleeps up to ``delay_ns`` (None: long)."""
        inbox = self._inbox
        if delay_ns != 0 and inbox.empty():
            item = None
            began_ns = perf_counter_ns()
            try:
                item = inbox.get(
                    timeout=None if delay_ns is None else min(delay_ns, _LONGEST_SLEEP_NS) / 1e9
                )
            except queue.Empty:
                pass
            idle_ns = perf_counter_ns() - began_ns
            self.counters.idle_ns += idle_ns
            for sequence in self._sequences:
                sequence.wait_ns += idle_ns
            if item is not None:
                self._handle(item)
        while not inbox.empty():
            self._handle(inbox.get_nowait())

    def _handle(self, item: Item) -> None:
        handler, sequence, payload = item
        try:
            handler(sequence, payload)
        except Exception as error:
            self._fail(sequence, error)

    def _handle_submit(
        self, sequence: SequenceT, payload: tuple[ReadPrompt, int, CachedRows, int]
    ) -> None:
        if sequence.is_closed:
            return
        if self._failure is not None:
            raise UnavailableError("the service's device has failed")
        read, sequence.slot, sequence.held, sequence.submitted_ns = payload
        sequence.prompt, sequence.rows = read.prompt, read.rows
        sequence.max_tokens = read.max_tokens
        self._sequences[sequence] = None
        self.counters.num_sequences = len(self._sequences)
        self.counters.num_opened += 1
        self._begin(sequence)

    def _handle_message(self, sequence: SequenceT, message: Any) -> None:
        if not sequence.is_closed:
            self._take_message(sequence, message)

    def _handle_close(self, sequence: SequenceT, _: None) -> None:
        self._close(sequence)

    def _handle_stop(self, _: None, done: asyncio.Future[Exception | None]) -> None:
        self._is_stopping = True
        for sequence in list(self._sequences):
            self._close(sequence, UnavailableError("the service is stopping"))
        self._mailbox.post(done.set_result, None)

    def _handle_call(self, function: Callable[[], Any], done: asyncio.Future[Any]) -> None:
        result, error = None, None
        try:
            result = function()
        except Exception as raised:
            error = raised
        self._mailbox.post(settle, done, result, error)

    def _advance_jobs(self) -> bool:
        """Runs pieces of the oldest jobs for as long as the running sequences can spare."""
        has_worked = len(self._jobs) > 0
        until_ns = perf_counter_ns() + prefill_budget_ns(
            num_waiting=len(self._jobs),
            num_running=self._num_stepped,
            forward_ns=self._forward_ns,
            tokens_each=self._tokens_each,
        )
        while (sequence := self._jobs.next()) is not None:
            self._advance_job(sequence)
            self._receive(0)
            if perf_counter_ns() >= until_ns:
                break
        return has_worked

    def _advance_job(self, sequence: SequenceT) -> None:
        """See Jobs.advance; a failure ends the sequence."""
        try:
            self._jobs.advance(sequence)
        except Exception as error:
            self._fail(sequence, error)
            self._check_device(error, sequence.slot)

    def _step(self, steps: list[tuple[SequenceT, StepT]]) -> None:
        """One forward; if it fails, each sequence alone, so that only the culprit ends."""
        rows = tuple(
            SequenceRows(sequence.slot, step.start_index, step.token_ids)
            for sequence, step in steps
        )
        plan = StepPlan(rows)
        began_ns = perf_counter_ns()
        try:
            logits = self.model.forward(plan)
            began_ns = max(began_ns, self._jobs.settle())  # a GPU begins when the piece is over
            token_ids = self._sample(steps, logits)
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
        self._num_stepped = len(rows)
        self._num_stepped_rows = plan.num_rows
        self.counters.count_forward(self._forward_ns, self._num_stepped_rows, len(rows))
        self._receive(0)
        num_tokens = 0
        for (sequence, step), ids in zip(steps, token_ids, strict=True):
            if not sequence.is_closed:
                try:
                    num_tokens += self._finish(sequence, step, ids, began_ns, ended_ns)
                except Exception as error:
                    self._fail(sequence, error)
        self._tokens_each = num_tokens / len(steps)

    def _fail(self, sequence: SequenceT, error: Exception) -> None:
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
        for sequence in list(self._sequences):
            self._close(sequence, UnavailableError("the service's device has failed"))
        self._mailbox.post(self._on_failure, error)
