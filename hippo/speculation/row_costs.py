"""Time of a target forward by its rows and sequences, learnt from verdicts."""

from __future__ import annotations

import copy
from bisect import bisect_left
from dataclasses import dataclass, field

# Forwards of similar size share a bucket: the largest number of rows in each.
_BUCKETS = (1, 2, 3, 5, 8, 12, 16, 24, 48, 96, 192)
_NEW = 0.2  # weight of a new measurement
_OUTLIER = 3.0  # one measurement moves a mean by at most this factor
_FIRST_OUTLIER = 1.5  # the first of its kind counts as so many times the expected at most
_DOUBT = 0.02  # with each measurement, of heavier forwards that look dear beside it
_KNOWN = 12  # rows up to which forwards of all models behave much as the typical one
_LEAP = 2.2  # times the largest forward that was measured


def _typical_cost(num_rows: float) -> float:
    """Cost of a forward relative to one row, before anything was measured."""
    return 1 + 0.12 * min(num_rows - 1, 3) + 0.05 * max(num_rows - 4, 0)


def moved(mean: float, value: float, *, weight: float = _NEW) -> float:
    """A running mean with a new value, which moves it by no more than an outlier may."""
    return mean + weight * (min(value, _OUTLIER * mean) - mean) if mean else value


def _weight(num_rows: float, num_sequences: float) -> float:
    """The size of a forward: a further sequence costs about what a further row does."""
    return num_rows + num_sequences - 1


@dataclass(slots=True)
class RowCosts:
    """Time of a target forward as a function of its rows and sequences.

    Forwards of similar weight share a bucket, which keeps their mean weight and time; between two
    buckets that were measured the time is interpolated, outside of them it follows a typical curve.
    A table's times never fall with more rows. Heavier forwards that look dear are doubted more and
    more while they are not measured: a policy would never come back to them after a slow one.
    """

    alone_ns: float = 0.0  # one row of one sequence while the draft rests; 0: not measured
    _weights: list[float] = field(default_factory=lambda: [0.0] * len(_BUCKETS))
    _times_ns: list[float] = field(default_factory=lambda: [0.0] * len(_BUCKETS))
    # What ``table`` has worked out since the last measurement, and for how many sequences.
    _table: list[float] = field(default_factory=list)
    _table_sequences: float = 0.0

    @property
    def is_known(self) -> bool:
        return any(self._times_ns)

    @property
    def known_weight(self) -> float:
        """Rows and further sequences up to which the times are more than guesses."""
        return max(_KNOWN, _LEAP * max(self._weights))

    def observe(self, num_rows: int, forward_ns: int, *, num_sequences: int = 1) -> None:
        """A forward of ``num_sequences``, with ``num_rows`` in all."""
        self._table = []
        weight = _weight(num_rows, num_sequences)
        bucket = next((i for i, most in enumerate(_BUCKETS) if weight <= most), len(_BUCKETS) - 1)
        mean_ns = self._times_ns[bucket]
        if mean_ns:
            # A time of the bucket's mean weight: heavier forwards must not look like slower ones.
            scale = _typical_cost(self._weights[bucket]) / _typical_cost(weight)
            self._times_ns[bucket] = moved(mean_ns, forward_ns * scale)
            mean = self._weights[bucket] + _NEW * (weight - self._weights[bucket])
            self._times_ns[bucket] *= _typical_cost(mean) / _typical_cost(self._weights[bucket])
            self._weights[bucket] = mean
        else:
            most_ns = _FIRST_OUTLIER * _interpolated(self._points(), weight)
            first_ns = min(float(forward_ns), most_ns) if self.is_known else float(forward_ns)
            self._weights[bucket], self._times_ns[bucket] = weight, first_ns
        for other, time_ns in enumerate(self._times_ns):
            if other > bucket and time_ns:
                scale = _typical_cost(self._weights[other]) / _typical_cost(self._weights[bucket])
                excess_ns = time_ns - scale * self._times_ns[bucket]
                self._times_ns[other] -= _DOUBT * max(excess_ns, 0.0)

    def observe_alone(self, forward_ns: int) -> None:
        """A forward of one row while the draft did nothing."""
        self.alone_ns = moved(self.alone_ns, forward_ns)

    def time_ns(self, num_rows: int, *, num_sequences: float = 1.0) -> float:
        """Nanoseconds of a forward with so many rows of each of the sequences; 0 while unknown."""
        weight = _weight(num_rows * num_sequences, num_sequences)
        return _interpolated(self._points(), weight)

    def table(self, most_rows: int, *, num_sequences: float = 1.0) -> list[float]:
        """The same with 0, 1, ... ``most_rows`` rows, none quicker than with fewer."""
        if not self._table or num_sequences != self._table_sequences:
            self._table, self._table_sequences = [0.0], num_sequences
        table = self._table
        if len(table) <= most_rows:
            points = self._points()
            for num_rows in range(len(table), most_rows + 1):
                weight = _weight(num_rows * num_sequences, num_sequences)
                table.append(max(_interpolated(points, weight), table[-1]))
        return table[: most_rows + 1]

    def scaled_to(self, num_rows: int, forward_ns: int, *, num_sequences: int = 1) -> RowCosts:
        """A copy in which such a forward takes so long, and all others in proportion."""
        expected_ns = _interpolated(self._points(), _weight(num_rows, num_sequences))
        scaled = copy.deepcopy(self)
        scaled._table = []
        if expected_ns:
            factor = min(max(forward_ns / expected_ns, 1 / _OUTLIER), _OUTLIER)
            scaled._times_ns = [factor * time_ns for time_ns in scaled._times_ns]
            scaled.alone_ns *= factor
        return scaled

    def _points(self) -> list[tuple[float, float]]:
        """What was measured: weights in ascending order, and their times."""
        return [pair for pair in zip(self._weights, self._times_ns, strict=True) if pair[1]]


def _interpolated(points: list[tuple[float, float]], weight: float) -> float:
    """The time at ``weight`` by measured points (weight, time) in ascending order; 0 without."""
    after = bisect_left(points, (weight,))
    if not points:
        return 0.0
    if 0 < after < len(points):
        (x0, y0), (x1, y1) = points[after - 1], points[after]
        return y0 + (y1 - y0) * (weight - x0) / (x1 - x0)
    x, y = points[min(after, len(points) - 1)]
    return y * _typical_cost(weight) / _typical_cost(x)
