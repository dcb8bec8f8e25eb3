"""Spread over clips: medians with bootstrap intervals, from paired measurements."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """A mean with its 95 % bootstrap interval and the range over clips."""

    mean: float
    low: float
    high: float
    minimum: float
    maximum: float

    def __str__(self) -> str:
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return {key: round(value, 4) for key, value in asdict(self).items()}


def spread(values: Sequence[float], *, num_resamples: int = 2000, seed: int = 0) -> Spread:
    """Mean over clips; the interval by resampling clips. Raises ValueError without values."""
    if not values:
        raise ValueError("no values to summarise")
    rng = random.Random(seed)
    means = sorted(
        statistics.fmean(rng.choices(values, k=len(values))) for _ in range(num_resamples)
    )
    return Spread(
        mean=statistics.fmean(values),
        low=means[int(0.025 * num_resamples)],
        high=means[int(0.975 * num_resamples) - 1],
        minimum=min(values),
        maximum=max(values),
    )
