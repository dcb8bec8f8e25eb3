"""What the simulator drives the cores with: costs, faults, devices in virtual time, the outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from hippo.speculation.stats import SpeculationStats
from hippo.types import Verdict

_MS = 1_000_000
COLD_AFTER_NS = 16 * _MS  # the rest that ``target_cold_ns`` and ``draft_cold_ns`` are for
_STAYS_COLD = 0.6  # of what a step behind a prompt takes longer, in the next one

StepCost = Callable[[int, int], float]
"""Nanoseconds of one forward, of its rows and of the tokens cached before them."""


def _no_delay() -> float:
    return 0.0


def _never_cold(_num_rows: int) -> float:
    return 0.0


def start_coldness(num_steps: int) -> float:
    """How cold the step behind a prompt and so many steps still is, as a share of the first one:
    the second one is as cold, as a prompt uses the weights once."""
    return _STAYS_COLD ** max(0, num_steps - 1)


@dataclass(frozen=True, slots=True)
class Costs:
    """What everything takes, in nanoseconds; the defaults are a small pair on two CPU cores.

    ``leg_ns`` and ``draft_prefill_delay_ns`` are latencies: nobody is busy meanwhile. The other
    times occupy a device.
    """

    target_ns: StepCost
    draft_ns: StepCost
    target_prefill_ns: int = 60 * _MS
    draft_prefill_ns: int = 30 * _MS
    draft_prefill_delay_ns: int = 0  # from the start until the draft may begin its prefill
    leg_ns: Callable[[], float] = lambda: 250_000.0  # one message, service to gateway or back
    # What a message waits longer while the receiver's core computes: its thread must get the core.
    late_ns: Callable[[], float] = _no_delay
    draft_message_ns: float = 0.0  # a relayed message takes this much from the draft's device
    # What gateway and client do about a verdict (text, stream), where they share its processor, and
    # about each of its tokens.
    draft_verdict_ns: float = 0.0
    draft_token_ns: float = 0.0
    # Share of all this by which the draft's step takes longer besides: its caches were used.
    draft_disturbance: float = 0.0
    target_message_ns: float = 0.0
    # What one more takes that arrives in a step: the core changes threads, and its caches are used.
    target_interruption_ns: float = 0.0
    draft_scheduling_ns: Callable[[], float] = _no_delay  # between two of its steps
    target_scheduling_ns: Callable[[], float] = _no_delay
    # By what share a step is slower while the other device computes: two devices that share
    # memory or a processor's units. Of a step that overlaps in part, that part is.
    target_contention: float = 0.0
    draft_contention: float = 0.0
    # What the first step behind a rest of COLD_AFTER_NS or more takes longer, by its rows, for
    # others have filled the caches meanwhile; behind a shorter one it is so much less.
    target_cold_ns: Callable[[int], float] = _never_cold
    draft_cold_ns: Callable[[int], float] = _never_cold
    # How cold the target's first step behind its prefill is: a share of ``target_cold_ns``.
    target_cold_start: float = 0.0


@dataclass(frozen=True, slots=True)
class Outage:
    """The draft is lost at one time and, if ``back_ns`` is set, attached again at another."""

    lost_ns: int
    back_ns: int | None = None


@dataclass(slots=True)
class Outcome:
    """How one simulated sequence went."""

    output_ids: list[int] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    first_token_ns: float = 0.0  # from the start of both prefills
    decode_ns: float = 0.0  # from the first token to the last
    draft_busy_ns: float = 0.0  # drafting steps, those in vain included
    num_draft_steps: int = 0
    num_events: int = 0
    most_queued: int = 0
    num_out_of_step: int = 0  # blocks of an epoch that the verifier had not reached
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    @property
    def tokens_per_second(self) -> float:
        """Of the decoding alone; 0 for a single token."""
        return (len(self.output_ids) - 1) / (self.decode_ns / 1e9) if self.decode_ns else 0.0

    @property
    def total_ns(self) -> float:
        """From the start of both prefills to the last token."""
        return self.first_token_ns + self.decode_ns


class Clock(Protocol):
    """Virtual time, in nanoseconds."""

    now: float

    def at(self, time_ns: float, event: Callable[[], None]) -> None:
        """Calls ``event`` then."""
        ...


class Device:
    """Runs one thing at a time; messages handled meanwhile make it take longer, and so does another
    device that runs beside it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.is_busy = False
        self.began = 0.0  # of what runs, what was pending before it being over
        self._ended = 0.0  # when the last run was over
        self._idle_from = 0.0
        self._idle_ns = 0.0  # up to then
        self._free_at = 0.0  # when what was asked of it so far is done
        self._own_until = 0.0  # the same, of what it does itself
        self._num_runs = 0
        self._done: Callable[[], None] = lambda: None
        self._is_fixed = False
        self._other: Device | None = None
        self._contention = 0.0

    def stand_beside(self, other: Device | None, contention: float) -> None:
        """Runs are slower by this share while ``other`` is busy; None: by itself from now on."""
        if other is None and self._other is not None and self.is_busy:
            self._other._stretch(1 / (1 + self._other._contention))
        self._other, self._contention = other, contention

    def run(self, duration_ns: float, done: Callable[[], None], *, is_fixed: bool = False) -> None:
        """Calls ``done`` when this is over; must not be busy. ``is_fixed``: however busy the other
        device is meanwhile, it takes so long."""
        self.disturb(0.0, by_others=True)
        self._idle_ns += max(0.0, self._free_at - max(self._clock.now, self._own_until))
        self.is_busy = True
        self.began = self._free_at
        self._num_runs += 1
        self._done, self._is_fixed = done, is_fixed
        other = self._other
        if other is not None:
            if other.is_busy and not is_fixed:
                duration_ns *= 1 + self._contention
            other._stretch(1 + other._contention)
        self.disturb(duration_ns)
        self._finish(self._num_runs)

    def disturb(self, duration_ns: float, *, by_others: bool = False) -> None:
        """Occupies it for so much longer; where others do, it waits as if it were idle."""
        now = self._clock.now
        if not self.is_busy:
            self._idle_ns += max(0.0, now - max(self._idle_from, self._own_until))
            self._idle_from = now
        self._free_at = max(self._free_at, now) + duration_ns
        if not by_others:
            self._own_until = self._free_at

    def _stretch(self, factor: float) -> None:
        """What is left of the run in progress takes so many times as long from now on."""
        if self.is_busy and not self._is_fixed and factor != 1:
            begin = max(self._clock.now, self.began)
            self._free_at = begin + factor * max(0.0, self._free_at - begin)
            if factor < 1:  # the event that is on its way comes too late
                self._clock.at(self._free_at, partial(self._finish, self._num_runs))

    @property
    def coldness(self) -> float:
        """How long it has rested, as a share of ``COLD_AFTER_NS``: from 0 to 1."""
        return min(1.0, (self._clock.now - self._ended) / COLD_AFTER_NS)

    def take_idle_ns(self) -> float:
        """How long it has had nothing at all to do itself since this was last asked."""
        self.disturb(0.0, by_others=True)
        idle_ns, self._idle_ns = self._idle_ns, 0.0
        return idle_ns

    def _finish(self, run: int) -> None:
        if run != self._num_runs or not self.is_busy:  # it ended earlier than this event was for
            return
        if self._free_at > self._clock.now:
            self._clock.at(self._free_at, partial(self._finish, run))
            return
        self.is_busy = False
        self._ended = self._idle_from = self._clock.now
        if self._other is not None:
            self._other._stretch(1 / (1 + self._other._contention))
        self._done()
