"""The simulator's parts: costs, outages, a clock, devices in virtual time and their caches."""

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from hippo.speculation.core import Step
from hippo.speculation.stats import SpeculationStats
from hippo.types import Verdict

_MS = 1_000_000

StepCost = Callable[[int, int], float]
"""Nanoseconds of one forward, a function of its number of rows and of cached tokens."""


@dataclass(frozen=True, slots=True)
class Costs:
    """All times in nanoseconds; the defaults fit a small pair on two CPU cores.

    ``leg_ns`` (one message between a service and the gateway, one way) and
    ``draft_prefill_delay_ns`` are latencies, which occupy no device. The other times occupy one.
    """

    target_ns: StepCost
    draft_ns: StepCost
    target_prefill_ns: int = 60 * _MS
    draft_prefill_ns: int = 30 * _MS
    draft_prefill_delay_ns: int = 0  # from the start to the beginning of the draft's prefill
    leg_ns: Callable[[], float] = lambda: 250_000.0
    draft_message_ns: float = 0.0  # device time per message
    target_message_ns: float = 0.0
    target_scheduling_ns: Callable[[], float] = lambda: 0.0  # between two steps of the target


@dataclass(frozen=True, slots=True)
class Outage:
    """The draft is lost at ``lost_ns`` and, if ``back_ns`` is set, attached again at that time."""

    lost_ns: int
    back_ns: int | None = None


@dataclass(slots=True)
class Outcome:
    """The result of one simulated sequence."""

    output_ids: list[int] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    first_token_ns: float = 0.0  # from the start of both prefills
    decode_ns: float = 0.0  # from the first token to the last
    num_events: int = 0
    num_out_of_step: int = 0  # blocks of an epoch later than the verifier's
    num_misread_steps: int = 0  # forwards that attended to tokens outside their path
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    @property
    def total_ns(self) -> float:
        """Time from the start of both prefills to the last token."""
        return self.first_token_ns + self.decode_ns


class Clock:
    """Virtual time in nanoseconds, and the queue of future events."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    @property
    def has_events(self) -> bool:
        """Whether the queue has events."""
        return bool(self._events)

    def call_at(self, time_ns: float, event: Callable[[], None]) -> None:
        """Schedules ``event``; events of the same time run in the order of scheduling."""
        heapq.heappush(self._events, (time_ns, next(self._order), event))

    def call_after(self, delay_ns: float, event: Callable[[], None]) -> None:
        """Schedules ``event`` after ``delay_ns``."""
        self.call_at(self.now + delay_ns, event)

    def run_next_event(self) -> None:
        """Moves the time to the next event and runs it."""
        self.now, _, event = heapq.heappop(self._events)
        event()


class Device:
    """A device that runs one task at a time; messages handled meanwhile prolong it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.is_busy = False
        self.began = 0.0  # start of the current task, after earlier work
        self._idle_from = 0.0
        self._idle_ns = 0.0  # idle time before ``_idle_from``
        self._free_at = 0.0  # end of all work so far
        self._own_until = 0.0  # end of its own work, without work for others

    def run(self, duration_ns: float, done: Callable[[], None]) -> None:
        """Runs a task of ``duration_ns`` and then calls ``done``. The device must not be busy."""
        self.occupy(0.0, by_others=True)
        self._idle_ns += max(0.0, self._free_at - max(self._clock.now, self._own_until))
        self.is_busy = True
        self.began = self._free_at
        self.occupy(duration_ns)
        self._finish(done)

    def occupy(self, duration_ns: float, *, by_others: bool = False) -> None:
        """Prolongs the device's work; work ``by_others`` counts as idle time."""
        now = self._clock.now
        if not self.is_busy:
            self._idle_ns += max(0.0, now - max(self._idle_from, self._own_until))
            self._idle_from = now
        self._free_at = max(self._free_at, now) + duration_ns
        if not by_others:
            self._own_until = self._free_at

    def take_idle_ns(self) -> float:
        """Returns the time without own work since the last call."""
        self.occupy(0.0, by_others=True)
        idle_ns, self._idle_ns = self._idle_ns, 0.0
        return idle_ns

    def _finish(self, done: Callable[[], None]) -> None:
        if self._free_at > self._clock.now:
            self._clock.call_at(self._free_at, partial(self._finish, done))
            return
        self.is_busy = False
        self._idle_from = self._clock.now
        done()


class KeyCache:
    """A model of one sequence's KV cache: the completion ids whose keys it holds.

    A step keeps what lies before its first row and writes its own rows. What lay behind them is of
    no later use, so it is not kept: a core that counts on it gets a gap.
    """

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._least_start = 0

    @property
    def ids(self) -> Sequence[int]:
        """The ids whose keys are held, from completion index 0; a live view."""
        return self._ids

    def feed(self, step: Step) -> list[int]:
        """Writes a step's rows; returns the ids that its first used row attends to, its own
        included."""
        assert step.start_index <= len(self._ids), "a step begins behind a gap in the cache"
        assert step.start_index >= self._least_start, "an earlier step ruled this one out"
        least = step.start_index if step.least_start is None else step.least_start
        self._least_start = max(self._least_start, least)
        self._ids[step.start_index :] = step.token_ids
        return self._ids[: step.first_index]
