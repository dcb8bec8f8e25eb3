"""Device work that is done piece by piece, a piece between two forwards: prefills and the like.

A GPU is handed a piece in a moment and takes its time over it. So that pieces cost what they take
there, and no forward stands behind more than one of them, the host waits for the piece before the
one that it has just handed over, and for the last one when it has handed over the forward behind
it: the device is never without work.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from time import perf_counter_ns

import torch

from hippo.engine.sequence import EngineSequence
from hippo.engine.stats import EngineCounters

Job = Generator[None, None, None]
"""A piece ends at each yield."""

Mark = Callable[[], Callable[[], None]]
"""Notes what the device was handed by now; gives what waits until that is done."""


def mark_on(device: torch.device) -> Mark:
    """That of a device; on a CPU all is done when it is called."""

    def mark_on_gpu() -> Callable[[], None]:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        wait: Callable[[], None] = event.synchronize
        return wait

    return mark_on_gpu if device.type == "cuda" else _nothing_to_mark


def _nothing_to_mark() -> Callable[[], None]:
    return _nothing_to_wait_for


def _nothing_to_wait_for() -> None:
    pass


class Jobs:
    """The jobs of all sequences, the oldest first. For the device thread alone."""

    def __init__(self, counters: EngineCounters, mark: Mark = _nothing_to_mark) -> None:
        self._counters = counters
        self._mark = mark
        self._wait_for_last = _nothing_to_wait_for
        self._last: EngineSequence | None = None  # whose piece that is
        self._entries: list[tuple[EngineSequence, Job]] = []
        self._running: Job | None = None
        self.piece_began_ns = 0  # when the piece in progress began, for its job

    def __len__(self) -> int:
        return len(self._entries)

    def device_ns(self, sequence: EngineSequence) -> int:
        """Device time of the sequence's jobs, up to now (inside a job)."""
        return sequence.job_ns + perf_counter_ns() - self.piece_began_ns

    def add(self, sequence: EngineSequence, job: Job) -> None:
        """Queues a job, which has not begun."""
        self._entries.append((sequence, job))

    def next(self) -> EngineSequence | None:
        """The sequence whose job is the oldest; None without a job."""
        return self._entries[0][0] if self._entries else None

    def advance(self, sequence: EngineSequence) -> None:
        """Runs the next piece of a sequence's oldest job and raises what it raises, which ends
        the job."""
        entry = next(entry for entry in self._entries if entry[0] is sequence)
        job = entry[1]
        self._running, self.piece_began_ns = job, perf_counter_ns()
        is_over = True
        try:
            next(job)
            is_over = False
        except StopIteration:
            pass
        finally:
            self._running = None
            try:
                self._wait_for_one_before(sequence)
            finally:
                duration_ns = perf_counter_ns() - self.piece_began_ns
                sequence.job_ns += duration_ns
                self._counters.prefill_ns += duration_ns
                if is_over and entry in self._entries:
                    self._entries.remove(entry)
        if sequence.is_closed:  # meanwhile
            job.close()

    def settle(self) -> int:
        """Waits until the device is through with the last piece, which takes that long as well;
        when that was, or 0 where there was nothing to wait for."""
        if self._wait_for_last is _nothing_to_wait_for:
            return 0
        began_ns = perf_counter_ns()
        wait, self._wait_for_last = self._wait_for_last, _nothing_to_wait_for
        wait()
        ended_ns = perf_counter_ns()
        self._counters.prefill_ns += ended_ns - began_ns
        if self._last is not None:
            self._last.job_ns += ended_ns - began_ns
        return ended_ns

    def _wait_for_one_before(self, sequence: EngineSequence) -> None:
        """Leaves the piece that was just handed over under way, and waits for that before it."""
        before, self._wait_for_last = self._wait_for_last, _nothing_to_wait_for
        self._wait_for_last = self._mark()
        self._last = None if sequence.is_closed else sequence
        before()

    def drop(self, sequence: EngineSequence) -> None:
        """Ends the sequence's jobs; one whose piece is in progress, when that is over."""
        for entry in [entry for entry in self._entries if entry[0] is sequence]:
            self._entries.remove(entry)
            if entry[1] is not self._running:
                entry[1].close()
        if self._last is sequence:  # what it held is to be freed
            self._last = None
