"""The adaptive policy's measurements, and the draft lengths derived from them.

docs/algorithms.md, "Which mode, and who decides", derives the formulas and the constants.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hippo.types import Timing

_FIRST_RATE = 0.85  # assumed acceptance rate of a pair before the first measurement
_PRIOR_WEIGHT = 4.0  # weight of an assumed rate, in tokens
_SEQUENCE_MEMORY, _PAIR_MEMORY = 0.97, 0.998  # weight of a token, relative to the next token
_MOST_RATE = 0.995  # bounds the expected number of tokens

_NEW = 0.2  # weight of a new measurement in a running mean
_OUTLIER = 3.0  # a measurement counts as at most this many times the expected value
_FORWARD_MEMORY = 0.95  # weight of a forward, relative to the next forward
_TYPICAL_SLOPE = 0.02  # assumed time of a row, as a share of the mean forward's time

_LOOK_BACK = 8  # steps in a draft's running mean
_CATCHING_UP = 8  # a draft's step with more settled ids did more than draft


class Acceptance:
    """Acceptance rate: the share of draft tokens that were right, weighted towards recent ones.

    ``prior`` is the rate assumed at first, with the weight of ``weight`` tokens. A token's weight
    is ``memory`` times the next token's.
    """

    def __init__(
        self,
        prior: float = _FIRST_RATE,
        *,
        weight: float = _PRIOR_WEIGHT,
        memory: float = _SEQUENCE_MEMORY,
    ) -> None:
        self._memory = memory
        self._right = prior * weight
        self._all = weight

    def of_next_sequence(self) -> "Acceptance":
        """Returns the rate of a sequence that begins with this rate. Its prior has the weight of
        all tokens seen here, but no more than a sequence remembers of its own tokens."""
        weight = min(self._all, 1 / (1 - _SEQUENCE_MEMORY))
        return Acceptance(self.rate, weight=weight)

    @property
    def rate(self) -> float:
        """Probability that a draft token is right if all tokens before it are."""
        return self._right / self._all

    def observe_outcomes(self, outcomes: Iterable[bool]) -> None:
        for is_right in outcomes:
            self._right = self._memory * self._right + is_right
            self._all = self._memory * self._all + 1


class RunningMean:
    """Exponentially weighted mean of times in nanoseconds; 0 before the first."""

    def __init__(self, value: float = 0.0) -> None:
        self.value = value

    def observe_time(self, value: float) -> None:
        """Updates the mean; a value counts as at most ``_OUTLIER`` times the mean."""
        bounded = min(value, _OUTLIER * self.value) if self.value else value
        self.value += (_NEW if self.value else 1.0) * (bounded - self.value)


class DraftTimeMean:
    """Running mean of the draft's time per token over the last steps of one sequence.

    A step that feeds many settled ids (after a rest, or when a draft joins in mid-answer) resets
    the mean: its time is not the time of drafting, and earlier times may no longer hold.
    """

    def __init__(self) -> None:
        self._mean_ns = 0.0
        self._mean_drafted = 0.0  # tokens per step

    @property
    def token_ns(self) -> int:
        """Device time per draft token in nanoseconds; 0 before the first token."""
        return round(self._mean_ns / self._mean_drafted) if self._mean_drafted else 0

    def observe_step(self, duration_ns: float, *, num_drafted: int, num_settled: int) -> None:
        """Takes the time of a step that fed ``num_settled`` settled ids and gave ``num_drafted``
        tokens."""
        if num_settled > _CATCHING_UP:
            self._mean_ns = self._mean_drafted = 0.0
        elif num_drafted:
            if not self._mean_drafted:
                self._mean_ns, self._mean_drafted = duration_ns, num_drafted
                return
            counted_ns = min(duration_ns, _OUTLIER * self._mean_ns)  # stalls are not steps
            self._mean_ns += (counted_ns - self._mean_ns) / _LOOK_BACK
            self._mean_drafted += (num_drafted - self._mean_drafted) / _LOOK_BACK


class ForwardTimes:
    """Fits a target forward's time as a straight line over its rows, by weighted least squares.

    Forwards with equal numbers of rows do not determine the slope. Therefore the fit adds a
    variance of one row squared, which pulls the slope towards a typical value.
    """

    def __init__(self) -> None:
        self._weight = self._rows = self._time = self._rows_rows = self._rows_time = 0.0

    @property
    def is_known(self) -> bool:
        return self._weight > 0

    def observe_forward(self, num_rows: int, forward_ns: float) -> None:
        """Takes the time of a forward with ``num_rows`` rows in all its sequences together."""
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
        """Returns the nanoseconds of a forward without rows and those per row, both at least 0."""
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
    """The measurements of all sequences of one pair of services.

    The policies of all sequences share them, so that a new sequence begins with known times.
    """

    acceptance: Acceptance = field(default_factory=lambda: Acceptance(memory=_PAIR_MEMORY))
    draft_step: RunningMean = field(default_factory=RunningMean)  # time per draft token
    # Time from a rejection to the first draft token after it.
    restart: RunningMean = field(default_factory=RunningMean)
    forwards: ForwardTimes = field(default_factory=ForwardTimes)
    # Acceptance rates of the first token that a broken run had after its wrong token, and of the
    # tokens after that one.
    reuse_first: Acceptance = field(default_factory=lambda: Acceptance(memory=_PAIR_MEMORY))
    reuse_later: Acceptance = field(default_factory=lambda: Acceptance(memory=_PAIR_MEMORY))
    num_sequences: float = 1.0  # mean number of sequences in a target forward
    takes_turns: bool = False  # draft and target share a device: one at work slows the other

    @property
    def is_known(self) -> bool:
        return self.forwards.is_known and self.draft_step.value > 0

    @property
    def one_row_ns(self) -> float:
        """Time of a target forward with one row per sequence at the present load, in nanoseconds:
        the time of a token without a draft."""
        return self.forwards_ns(0)[0]

    def observe_forward(self, timing: Timing) -> None:
        """Takes the times of a target forward, as reported to one of its sequences."""
        shared = max(timing.num_sequences, 1)
        num_rows = timing.num_batch_rows or timing.num_rows or 1
        self.forwards.observe_forward(num_rows, timing.forward_ns)
        # Each sequence of the forward reports it once, hence the division.
        self.num_sequences += _NEW * (shared - self.num_sequences) / shared

    def observe_reuse(self, outcomes: Sequence[bool], *, is_start: bool) -> None:
        """Takes for tokens of a broken run, in order, whether they were right; ``is_start``: the
        first one is the first after the wrong token."""
        self.reuse_first.observe_outcomes(outcomes[:is_start])
        self.reuse_later.observe_outcomes(outcomes[is_start:])

    def drafting_ns(self, num_tokens: int) -> float:
        """Returns the nanoseconds in which an idle draft proposes tokens after a verdict."""
        first = self.restart.value or self.draft_step.value
        return first + (num_tokens - 1) * self.draft_step.value if num_tokens else 0.0

    def forwards_ns(self, most: int) -> list[float]:
        """Returns the nanoseconds of forwards with 0 to ``most`` draft tokens per sequence.

        All sequences of a forward wait for each sequence's rows. So each sequence assumes that the
        others choose the same draft length, and then its choice is the best for all of them.
        """
        fixed, per_row = self.forwards.line()
        return [fixed + per_row * self.num_sequences * (num + 1) for num in range(most + 1)]


class Lengths(NamedTuple):
    """Numbers of draft tokens, and their expected speedup over target-only decoding."""

    most: int  # in a forward
    first: int  # tokens that the idle target waits for after a rejection; 0: it decodes alone
    reused: int  # tokens of a broken run, verified instead of waiting; 0: the target waits
    block: int  # in a message from the draft
    speedup: float


def best_lengths(times: PairTimes, rate: float, most: int) -> Lengths:
    """Returns the draft lengths, at most ``most``, of the highest expected decoding speed.

    ``times.is_known`` must hold, and ``rate`` is the acceptance rate. docs/algorithms.md explains
    the symbols: a is ``rate``, T is ``forward_ns``, E is ``tokens``, d is ``step_ns``, L is
    ``restart``.
    """
    rate = min(rate, _MOST_RATE)
    step_ns = times.draft_step.value
    # Time of a forward with 0 to ``most`` draft tokens, and the tokens expected of it.
    forward_ns = times.forwards_ns(most)
    tokens = [(1 - rate ** (num + 1)) / (1 - rate) for num in range(most + 1)]
    # A run's first forward waits until its tokens are drafted; the next ones run meanwhile.
    first_ns = [times.drafting_ns(num) + forward_ns[num] for num in range(most + 1)]
    next_ns = [max(forward_ns[num], (num + 1) * step_ns) for num in range(most + 1)]
    one_row_ns = forward_ns[0]
    if times.takes_turns:
        best = max(range(1, most + 1), key=lambda num: tokens[num] / first_ns[num])
        return Lengths(best, best, 0, best, one_row_ns * tokens[best] / first_ns[best])

    longest = max(range(most + 1), key=lambda num: tokens[num] / forward_ns[num])
    steady = max(range(most + 1), key=lambda num: tokens[num] / next_ns[num])
    # Expected time of the forwards after a run's first forward, if there are any.
    rest_ns = next_ns[steady] / (1 - rate ** (steady + 1))
    run_ns = [first_ns[num] + rate ** (num + 1) * rest_ns for num in range(longest + 1)]
    first = min(range(longest + 1), key=run_ns.__getitem__)
    reused = _best_reused(times, rate, forward_ns, rest_ns=rest_ns, run_ns=run_ns[first])
    return Lengths(
        most=max(longest, 1),
        first=first,
        reused=reused,
        block=max(1, min(steady, int(one_row_ns / (2 * step_ns)))),
        speedup=one_row_ns / (1 - rate) / run_ns[first],
    )


def _best_reused(
    times: PairTimes, rate: float, forward_ns: Sequence[float], *, rest_ns: float, run_ns: float
) -> int:
    """Returns how many tokens of a broken run are best reused; 0: waiting for the draft is better.

    A run takes ``run_ns`` without reused tokens, and ``rest_ns`` after its first forward.
    """
    token_ns = rest_ns * (1 - rate)  # time of a token while a run goes on: a right token saves it
    num_right, best, least_ns = 0.0, 0, run_ns
    for num in range(1, len(forward_ns)):
        num_right += times.reuse_first.rate * times.reuse_later.rate ** (num - 1)
        reuse_ns = forward_ns[num] + rate * rest_ns - num_right * token_ns
        if reuse_ns < least_ns:
            best, least_ns = num, reuse_ns
    return best
