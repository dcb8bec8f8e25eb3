"""What a policy knows about the pair: costs of a step, load, acceptance, latency; running means."""

from __future__ import annotations

from dataclasses import dataclass, field

from hippo.types import Timing

# Forwards of similar size share a bucket: the largest number of rows in each.
_BUCKETS = (1, 2, 3, 5, 8, 12, 16, 24, 48, 96, 192)
_NEW = 0.2  # weight of a new measurement
_OUTLIER = 3.0  # one measurement moves a mean by at most this factor
_FIRST_OUTLIER = 1.5  # the first of its kind counts as so many times the expected at most
_DOUBT = 0.02  # with each measurement, of heavier forwards that look dear beside it


def _typical_cost(num_rows: float) -> float:
    """Cost of a forward relative to one row, before anything was measured."""
    return 1 + 0.12 * min(num_rows - 1, 3) + 0.05 * max(num_rows - 4, 0)


def _moved(mean: float, value: float) -> float:
    return mean + _NEW * (min(value, _OUTLIER * mean) - mean) if mean else value


def _weight(num_rows: float, num_sequences: float) -> float:
    """The size of a forward: a further sequence costs about what a further row does."""
    return num_rows + num_sequences - 1


@dataclass(slots=True)
class RowCosts:
    """Time of a target forward as a function of its rows and sequences, learnt from verdicts.

    Forwards of similar weight share a bucket, which keeps their mean weight and time; between two
    buckets that were measured the time is interpolated, outside of them it follows a typical
    curve. The result never falls with more rows. Heavier forwards that look dear are doubted more
    and more while they are not measured: a policy would never come back to them after a slow one.
    """

    _weights: list[float] = field(default_factory=lambda: [0.0] * len(_BUCKETS))
    _times_ns: list[float] = field(default_factory=lambda: [0.0] * len(_BUCKETS))

    @property
    def is_known(self) -> bool:
        return any(self._times_ns)

    def observe(self, num_rows: int, forward_ns: int, *, num_sequences: int = 1) -> None:
        """A forward of ``num_sequences``, with ``num_rows`` in all."""
        weight = _weight(num_rows, num_sequences)
        bucket = next((i for i, most in enumerate(_BUCKETS) if weight <= most), len(_BUCKETS) - 1)
        mean_ns = self._times_ns[bucket]
        if mean_ns:
            # A time of the bucket's mean weight: heavier forwards must not look like slower ones.
            scale = _typical_cost(self._weights[bucket]) / _typical_cost(weight)
            self._times_ns[bucket] = _moved(mean_ns, forward_ns * scale)
            moved = self._weights[bucket] + _NEW * (weight - self._weights[bucket])
            self._times_ns[bucket] *= _typical_cost(moved) / _typical_cost(self._weights[bucket])
            self._weights[bucket] = moved
        else:
            most_ns = _FIRST_OUTLIER * _interpolated(self._points(), weight)
            first_ns = min(float(forward_ns), most_ns) if self.is_known else float(forward_ns)
            self._weights[bucket], self._times_ns[bucket] = weight, first_ns
        for other, time_ns in enumerate(self._times_ns):
            if other > bucket and time_ns:
                scale = _typical_cost(self._weights[other]) / _typical_cost(self._weights[bucket])
                excess_ns = time_ns - scale * self._times_ns[bucket]
                self._times_ns[other] -= _DOUBT * max(excess_ns, 0.0)

    def table(self, most_rows: int, *, num_sequences: float = 1.0) -> list[float]:
        """Nanoseconds of a forward with 0, 1, ... ``most_rows`` rows of each of the sequences."""
        points = self._points()
        costs = [0.0]
        for num_rows in range(1, most_rows + 1):
            weight = _weight(num_rows * num_sequences, num_sequences)
            costs.append(max(_interpolated(points, weight), costs[-1]))
        return costs

    def _points(self) -> list[tuple[float, float]]:
        """What was measured: weights in ascending order, and their times."""
        return [pair for pair in zip(self._weights, self._times_ns, strict=True) if pair[1]]


def _interpolated(points: list[tuple[float, float]], weight: float) -> float:
    """The time at ``weight`` by measured points (weight, time) in ascending order; 0 without."""
    after = next((i for i, point in enumerate(points) if point[0] >= weight), len(points))
    if not points:
        return 0.0
    if 0 < after < len(points):
        (x0, y0), (x1, y1) = points[after - 1], points[after]
        return y0 + (y1 - y0) * (weight - x0) / (x1 - x0)
    x, y = points[min(after, len(points) - 1)]
    return y * _typical_cost(weight) / _typical_cost(x)


@dataclass(slots=True)
class Acceptance:
    """Decayed share of draft tokens that were right; the first of a run is counted apart."""

    prior: float = 0.85
    prior_weight: float = 4.0
    decay: float = 0.985
    num_trials: int = 0  # since the last reset
    num_right: int = 0  # of these
    _right: float = 0.0
    _all: float = 0.0
    _first_right: float = 0.0
    _first_all: float = 0.0

    def observe(self, *, is_right: bool, is_first: bool) -> None:
        self.num_trials += 1
        self.num_right += is_right
        self._right = self._right * self.decay + is_right
        self._all = self._all * self.decay + 1
        if is_first:
            self._first_right = self._first_right * 0.9 + is_right
            self._first_all = self._first_all * 0.9 + 1

    def forget(self) -> None:
        """Keeps what is known as a weak prior only."""
        self.prior = self.rate
        self.prior_weight = 2.0
        self.num_trials = self.num_right = 0
        self._right = self._all = self._first_right = self._first_all = 0.0

    @property
    def rate(self) -> float:
        """Probability that a draft token is right, given that all before it are."""
        return (self._right + self.prior * self.prior_weight) / (self._all + self.prior_weight)

    @property
    def first_rate(self) -> float:
        """The same for the first token after a rejection."""
        return (self._first_right + 3 * self.rate) / (self._first_all + 3)


@dataclass(slots=True)
class Latency:
    """Times around the draft, in nanoseconds; 0 while unknown."""

    draft_step_ns: float = 0.0
    first_token_ns: float = 0.0  # from a rejection until its first draft token is at the target

    def observe_step(self, step_ns: int) -> None:
        self.draft_step_ns = _moved(self.draft_step_ns, step_ns)

    def observe_first_token(self, delay_ns: float) -> None:
        self.first_token_ns = _moved(self.first_token_ns, max(delay_ns, 1.0))


@dataclass(slots=True)
class PairTimes:
    """What all sequences of one pair of services have measured together.

    Shared by the policies of a gateway, so that a new sequence begins with what is known of the
    machine and of the load.
    """

    costs: RowCosts = field(default_factory=RowCosts)
    latency: Latency = field(default_factory=Latency)
    acceptance: Acceptance = field(default_factory=lambda: Acceptance(decay=0.998))
    num_sequences: float = 1.0  # that share a forward of the target

    @property
    def is_known(self) -> bool:
        """Whether a pace can be chosen by it."""
        return self.costs.is_known and self.latency.draft_step_ns > 0

    def observe_forward(self, num_rows: int, timing: Timing) -> None:
        """A sequence's ``num_rows`` rows ran in a forward."""
        shared = max(timing.num_sequences, 1)
        rows = timing.num_batch_rows or num_rows
        self.costs.observe(rows, timing.forward_ns, num_sequences=shared)
        # Each of them says so once.
        self.num_sequences += (shared - self.num_sequences) * _NEW / shared

    def cost_table(self, most_rows: int) -> list[float]:
        """Nanoseconds of a forward at this load, if each sequence has 0, 1, ... rows in it.

        Rows are dear under load: what one sequence adds, all wait for. Taking others to do as it
        does, a sequence chooses what is best for all of them together.
        """
        return self.costs.table(most_rows, num_sequences=self.num_sequences)


def expected_rate(
    num_first: int,
    num_most: int,
    *,
    costs: list[float],
    acceptance: Acceptance,
    latency: Latency,
) -> float:
    """Expected tokens a nanosecond, if the target waits for ``num_first`` draft tokens after a
    rejection and verifies at most ``num_most`` in a forward.

    One cycle goes from a rejection to the next: the draft's correction travels, the first block
    is verified, and while blocks are accepted whole each next one holds what was drafted in the
    meantime. ``costs[n]`` is the time of n rows, up to ``num_most + 1``.
    """
    rate, first_rate = min(acceptance.rate, 0.995), min(acceptance.first_rate, 0.995)
    step_ns = latency.draft_step_ns
    cost = costs[num_first + 1]
    tokens = 1 + first_rate * (1 - rate**num_first) / (1 - rate)
    time_ns = cost
    if num_first:
        time_ns += latency.first_token_ns + (num_first - 1) * step_ns
        queue = cost / step_ns
    else:
        queue = max(0.0, (cost - latency.first_token_ns) / step_ns + 1)
    going: float = first_rate * rate**num_first
    for turn in range(8):
        queue -= 1  # compared with the target's own token
        if queue < 1:
            time_ns += going * (1 - queue) * step_ns
            queue = 1
        num_tokens = min(int(queue), num_most)
        cost = costs[num_tokens + 1]
        survival = rate ** (num_tokens + 1)
        weight = going / (1 - survival) if turn == 7 else going
        tokens += weight * (1 - survival) / (1 - rate)
        time_ns += weight * cost
        going *= survival
        if going < 0.02:
            break
        queue = min(queue - num_tokens + cost / step_ns, 2 * num_most)
    return tokens / time_ns
