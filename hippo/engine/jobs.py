"""Device work in pieces, such as a prefill: pieces run between two forwards.

A GPU runs a piece asynchronously. After queuing a piece, the host waits for the piece before it;
after queuing a forward, it waits for the last piece. Therefore each piece is charged its device
time, at most one piece delays a forward, and the device always has queued work.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns

import torch

from hippo.engine.sequence import EngineSequence, Job
from hippo.engine.stats import EngineCounters

_OVER = object()


def mark_on(device: torch.device) -> Callable[[], None]:
    """Marks the work queued on a device so far; returns a function that waits for its end. On a
    CPU, where calls are synchronous, there is nothing to wait for."""
    if device.type != "cuda":
        return _nothing_to_wait_for
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    wait: Callable[[], None] = event.synchronize
    return wait


def _nothing_to_wait_for() -> None:
    pass


@dataclass(slots=True, eq=False)
class _Entry:
    sequence: EngineSequence
    job: Job
    num_tokens: int  # length of the prompt
    has_begun: bool = False

    @property
    def client(self) -> str:
        return self.sequence.request.client


class Jobs:
    """The jobs of all sequences; only the device thread uses them. Those of a paused sequence wait.

    The oldest runs to its end, but for a job of another client whose prompt is at most half as
    long: both then take turns, so that nobody waits for another client's long prompt. Prompts that
    have begun have together at most ``capacity`` tokens, the length of the longest prompt, for
    which there is memory.
    """

    def __init__(
        self,
        counters: EngineCounters,
        mark: Callable[[], Callable[[], None]] = lambda: _nothing_to_wait_for,
        *,
        capacity: int = 0,
    ) -> None:
        """``mark`` is ``mark_on`` for the device."""
        self._counters = counters
        self._mark = mark
        self._capacity = capacity
        self._wait_for_last = _nothing_to_wait_for
        self._last: EngineSequence | None = None  # the sequence of that piece
        self._entries: list[_Entry] = []
        # Device time of each client that has jobs; a new client begins with the least of them.
        self._served_ns: dict[str, int] = {}
        self._running: Job | None = None

    def __len__(self) -> int:
        """Returns the number of jobs that may run."""
        return sum(not entry.sequence.is_paused for entry in self._entries)

    def add_job(self, sequence: EngineSequence, job: Job, *, num_tokens: int = 0) -> None:
        """Queues a job that has not started, of a prompt of ``num_tokens`` tokens."""
        least_ns = min(self._served_ns.values(), default=0)
        self._served_ns.setdefault(sequence.request.client, least_ns)
        self._entries.append(_Entry(sequence, job, num_tokens))

    def next_sequence(self) -> EngineSequence | None:
        """Returns the sequence whose oldest job is next, or None if there is no job."""
        begun = [entry.num_tokens for entry in self._entries if entry.has_begun]
        running = [entry for entry in self._entries if not entry.sequence.is_paused]
        longest = max((entry.num_tokens for entry in running if entry.has_begun), default=0)
        if not begun:
            return running[0].sequence if running else None
        first: dict[str, _Entry] = {}  # each client's oldest
        for entry in running:
            first.setdefault(entry.client, entry)

        def may_run(entry: _Entry) -> bool:
            is_short = not longest or 2 * entry.num_tokens <= longest
            return entry.has_begun or (is_short and entry.num_tokens + sum(begun) <= self._capacity)

        able = filter(may_run, first.values())
        best = min(
            able, key=lambda entry: (self._served_ns[entry.client], entry.has_begun), default=None
        )
        return None if best is None else best.sequence

    def advance_job(self, sequence: EngineSequence) -> None:
        """Runs the next piece of a sequence's oldest job; an exception ends the job and is
        raised again."""
        entry = next(entry for entry in self._entries if entry.sequence is sequence)
        job = entry.job
        entry.has_begun = True
        self._running, sequence.piece_began_ns = job, perf_counter_ns()
        sequence.began_ns = sequence.began_ns or sequence.piece_began_ns
        is_over = True
        try:
            is_over = next(job, _OVER) is _OVER
        finally:
            self._running = None
            try:
                # Mark the piece just queued, and wait for the piece before it.
                before, self._wait_for_last = self._wait_for_last, _nothing_to_wait_for
                self._wait_for_last = self._mark()
                self._last = None if sequence.is_closed else sequence
                before()
            finally:
                duration_ns = perf_counter_ns() - sequence.piece_began_ns
                sequence.job_ns += duration_ns
                self._counters.prefill_ns += duration_ns
                if entry in self._entries:
                    self._served_ns[entry.client] += duration_ns
                    if is_over:
                        self._remove(entry)
        if sequence.is_closed:
            job.close()

    def wait_for_device(self) -> int:
        """Waits for the device to finish the last piece, and adds the wait to its duration.
        Returns the time of the end (``perf_counter_ns``), or 0 if no piece was in progress."""
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

    def drop_jobs(self, sequence: EngineSequence) -> None:
        """Ends the sequence's jobs; a job with a piece in progress ends after this piece."""
        for entry in [entry for entry in self._entries if entry.sequence is sequence]:
            self._remove(entry)
            if entry.job is not self._running:
                entry.job.close()
        if self._last is sequence:  # no reference may keep a closed sequence alive
            self._last = None

    def _remove(self, entry: _Entry) -> None:
        self._entries.remove(entry)
        if all(entry.client != other.client for other in self._entries):
            del self._served_ns[entry.client]
