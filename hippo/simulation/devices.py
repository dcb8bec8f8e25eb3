"""What the simulator drives the cores with: costs, outages, devices in virtual time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from hippo.speculation.stats import SpeculationStats
from hippo.types import Verdict

_MS = 1_000_000

StepCost = Callable[[int, int], float]
"""Nanoseconds of one forward, of its rows and of the tokens cached before them."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What everything takes, in nanoseconds; the defaults are a small pair on two CPU cores.

    ``leg_ns`` (one message, from a service to the gateway or back) and ``draft_prefill_delay_ns``
    are latencies: no device is busy meanwhile. The other times occupy a device.
    """

    target_ns: StepCost
    draft_ns: StepCost
    target_prefill_ns: int = 60 * _MS
    draft_prefill_ns: int = 30 * _MS
    draft_prefill_delay_ns: int = 0  # from the start until the draft may begin its prefill
    leg_ns: Callable[[], float] = lambda: 250_000.0
    draft_message_ns: float = 0.0  # what a message takes from the device
    target_message_ns: float = 0.0
    target_scheduling_ns: Callable[[], float] = lambda: 0.0  # between two of the target's steps


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
    num_draft_steps: int = 0
    num_events: int = 0
    num_out_of_step: int = 0  # blocks of an epoch that the verifier had not reached
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    @property
    def total_ns(self) -> float:
        """From the start of both prefills to the last token."""
        return self.first_token_ns + self.decode_ns


class Clock:
    """Virtual time, in nanoseconds, and what is to happen then."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    @property
    def has_events(self) -> bool:
        """Whether anything is to happen."""
        return bool(self._events)

    def at(self, time_ns: float, event: Callable[[], None]) -> None:
        """Calls ``event`` then; those of one time in the order in which they were given."""
        heapq.heappush(self._events, (time_ns, next(self._order), event))

    def after(self, delay_ns: float, event: Callable[[], None]) -> None:
        """Calls ``event`` so much later."""
        self.at(self.now + delay_ns, event)

    def advance(self) -> None:
        """Goes on to the next event."""
        self.now, _, event = heapq.heappop(self._events)
        event()


class Device:
    """Runs one thing at a time; messages handled meanwhile make it take longer."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.is_busy = False
        self.began = 0.0  # of what runs, what was pending before it being over
        self._idle_from = 0.0
        self._idle_ns = 0.0  # up to then
        self._free_at = 0.0  # when what was asked of it so far is done
        self._own_until = 0.0  # the same, of what it does itself

    def run(self, duration_ns: float, done: Callable[[], None]) -> None:
        """Calls ``done`` when this is over; must not be busy."""
        self.disturb(0.0, by_others=True)
        self._idle_ns += max(0.0, self._free_at - max(self._clock.now, self._own_until))
        self.is_busy = True
        self.began = self._free_at
        self.disturb(duration_ns)
        self._finish(done)

    def disturb(self, duration_ns: float, *, by_others: bool = False) -> None:
        """Occupies it for so much longer; where others do, it waits as if it were idle."""
        now = self._clock.now
        if not self.is_busy:
            self._idle_ns += max(0.0, now - max(self._idle_from, self._own_until))
            self._idle_from = now
        self._free_at = max(self._free_at, now) + duration_ns
        if not by_others:
            self._own_until = self._free_at

    def take_idle_ns(self) -> float:
        """How long it has had nothing at all to do itself since this was last asked."""
        self.disturb(0.0, by_others=True)
        idle_ns, self._idle_ns = self._idle_ns, 0.0
        return idle_ns

    def _finish(self, done: Callable[[], None]) -> None:
        if self._free_at > self._clock.now:
            self._clock.at(self._free_at, partial(self._finish, done))
            return
        self.is_busy = False
        self._idle_from = self._clock.now
        done()
