"""What the adaptive policy measures, and the draft lengths that follow from it.

docs/algorithms.md, "Which mode, and who decides", derives the formulas and the constants.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from hippo.types import Timing

_FIRST_RATE = 0.85  # acceptance rate that is assumed of a pair before anything was measured
_PRIOR_WEIGHT = 4.0  # tokens that the assumption counts for
_SEQUENCE_MEMORY, _PAIR_MEMORY = 0.97, 0.998  # a token's weight when one more has been compared
_MOST_RATE = 0.995  # above it, the expected number of tokens would know no bound

_NEW = 0.2  # weight of a new measurement in a running mean
_OUTLIER = 3.0  # a measurement counts as so many times the expected value at most
_FORWARD_MEMORY = 0.95  # a forward's weight when one more has been measured
_TYPICAL_SLOPE = 0.02  # share of a mean forward that a row costs, where forwards tell nothing


class Acceptance:
    """Acceptance rate: the share of draft tokens that were right, recent ones counting more."""

    def __init__(self, prior: float = _FIRST_RATE, *, memory: float = _SEQUENCE_MEMORY) -> None:
        """``prior`` is the rate assumed at first; a token counts ``memory`` times what the next
        one does."""
        self._memory = memory
        self._right = prior * _PRIOR_WEIGHT
        self._all = _PRIOR_WEIGHT

    @property
    def rate(self) -> float:
        """Probability that a draft token is right if all tokens before it are."""
        return self._right / self._all

    def observe(self, outcomes: Iterable[bool]) -> None:
        """Takes whether each token that was compared was right, in order."""
        for is_right in outcomes:
            self._right = self._memory * self._right + is_right
            self._all = self._memory * self._all + 1


class RunningMean:
    """Exponentially weighted mean of times in nanoseconds; 0 before the first."""

    def __init__(self, value: float = 0.0) -> None:
        self.value = value

    def observe(self, value: float) -> None:
        """Moves the mean; an outlier moves it no further than ``_OUTLIER`` times the mean would."""
        bounded = min(value, _OUTLIER * self.value) if self.value else value
        self.value += (_NEW if self.value else 1.0) * (bounded - self.value)


class ForwardTimes:
    """Time of a target forward as a line over its rows, by weighted least squares.

    The line through a single number of rows is not determined, so one row squared of weight pulls
    the slope towards a typical one.
    """

    def __init__(self) -> None:
        self._weight = self._rows = self._time = self._rows_rows = self._rows_time = 0.0

    @property
    def is_known(self) -> bool:
        return self._weight > 0

    def observe(self, num_rows: int, forward_ns: float) -> None:
        """Takes a forward with ``num_rows`` rows of all its sequences together."""
        if self.is_known:
            fixed, per_row = self.line()
            forward_ns = min(forward_ns, _OUTLIER * (fixed + per_row * num_rows))
        keep = _FORWARD_MEMORY
        self._weight = keep * self._weight + 1
        self._rows = keep * self._rows + num_rows
        self._time = keep * self._time + forward_ns
        self._rows_rows = keep * self._rows_rows + num_rows * num_rows
        self._rows_time = keep * self._rows_time + num_rows * forward_ns

    def line(self) -> tuple[float, float]:
        """Nanoseconds of a forward without rows, and of each row; at least 0 both."""
        if not self.is_known:
            return 0.0, 0.0
        rows, time = self._rows / self._weight, self._time / self._weight
        variance = self._rows_rows / self._weight - rows * rows
        covariance = self._rows_time / self._weight - rows * time
        per_row = (covariance + _TYPICAL_SLOPE * time) / (variance + 1.0)
        per_row = min(max(per_row, 0.0), time / rows)
        return time - per_row * rows, per_row


@dataclass(slots=True)
class PairTimes:
    """What all sequences of one pair of services have measured together.

    The gateway's policies share it, so that a new sequence begins with what is known.
    """

    acceptance: Acceptance = field(default_factory=lambda: Acceptance(memory=_PAIR_MEMORY))
    draft_step: RunningMean = field(default_factory=RunningMean)  # of one drafted token
    # From a rejection until the first draft token behind it.
    restart: RunningMean = field(default_factory=RunningMean)
    forwards: ForwardTimes = field(default_factory=ForwardTimes)
    num_sequences: float = 1.0  # mean number that share a forward of the target

    @property
    def is_known(self) -> bool:
        """Whether draft lengths can be derived."""
        return self.forwards.is_known and self.draft_step.value > 0

    @property
    def one_row_ns(self) -> float:
        """A target forward with one row of each sequence at this load: what a token costs without
        a draft."""
        return self.forwards_ns(0)[0]

    def observe_forward(self, timing: Timing) -> None:
        """Takes the times of a forward of the target that one of the sequences had rows in."""
        shared = max(timing.num_sequences, 1)
        self.forwards.observe(timing.num_batch_rows or timing.num_rows or 1, timing.forward_ns)
        # Each of the sequences that share the forward says so once.
        self.num_sequences += _NEW * (shared - self.num_sequences) / shared

    def forwards_ns(self, most: int) -> list[float]:
        """Nanoseconds of a forward with 0 to ``most`` draft tokens of each sequence at this load.

        What one sequence adds to a forward, all of them wait for. A sequence that takes the others
        to do as it does chooses what is best for all of them together.
        """
        fixed, per_row = self.forwards.line()
        return [fixed + per_row * self.num_sequences * (num + 1) for num in range(most + 1)]


class Lengths(NamedTuple):
    """Numbers of draft tokens, and the speedup over target-only decoding expected of them."""

    most: int  # in one forward
    first: int  # that the idle target waits for behind a rejection; 0: it goes on alone
    block: int  # in one message from the draft
    speedup: float


def best_lengths(times: PairTimes, rate: float, most: int) -> Lengths:
    """The lengths, at most ``most``, of the highest expected rate; ``times`` must be known.

    ``rate`` is the acceptance rate. See docs/algorithms.md for the symbols: T is ``forward``, E is
    ``tokens``, d is ``step`` and L is ``restart``.
    """
    rate = min(rate, _MOST_RATE)
    step, restart = times.draft_step.value, times.restart.value or times.draft_step.value
    forward = times.forwards_ns(most)
    tokens = [(1 - rate ** (num + 1)) / (1 - rate) for num in range(most + 1)]
    first_ns = [forward[0], *(forward[n] + restart + (n - 1) * step for n in range(1, most + 1))]
    going_ns = [max(forward[num], (num + 1) * step) for num in range(most + 1)]

    lengths = range(most + 1)
    longest = max(lengths, key=lambda num: tokens[num] / forward[num])
    going = max(lengths, key=lambda num: tokens[num] / going_ns[num])
    # Expected time of the forwards behind a run's first one, if there are any.
    rest_ns = going_ns[going] / (1 - rate ** (going + 1))
    run_ns = [first_ns[num] + rate ** (num + 1) * rest_ns for num in range(longest + 1)]
    first = min(range(longest + 1), key=lambda num: run_ns[num])
    return Lengths(
        most=max(longest, 1),
        first=first,
        block=max(1, min(going, int(forward[0] / (2 * step)))),
        speedup=forward[0] / (1 - rate) / run_ns[first],
    )
