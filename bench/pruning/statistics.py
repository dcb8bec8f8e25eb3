"""Shares of tokens with bootstrap intervals over clips."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

_NUM_RESAMPLES = 2000

Interval = dict[str, float]
"""``mean`` of a share, and ``low`` and ``high`` of its 95 % bootstrap interval over clips."""


@dataclass(slots=True)
class Counts:
    """Hits and totals by clip."""

    hits: dict[str, float] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)

    def add_hits(self, clip: str, hits: float, total: float) -> None:
        """Adds to a clip's hits and total."""
        self.hits[clip] = self.hits.get(clip, 0.0) + hits
        self.totals[clip] = self.totals.get(clip, 0.0) + total

    @property
    def share(self) -> float:
        """Hits divided by total over all clips; 0 without counts."""
        total = sum(self.totals.values())
        return sum(self.hits.values()) / total if total else 0.0

    @property
    def num_clips(self) -> int:
        """The number of clips."""
        return len(self.totals)


def interval(counts: Counts) -> Interval:
    """Returns the share with its interval. Raises ValueError without counts."""
    return _interval(counts.share, _resampled(counts, sorted(counts.totals)))


def difference(first: Counts, second: Counts) -> Interval:
    """Returns the first share minus the second, with both resampled on the same clips.

    Raises ValueError unless both count the same clips.
    """
    clips = sorted(first.totals)
    if clips != sorted(second.totals):
        raise ValueError("a paired difference needs the same clips on both sides")
    resampled = _resampled(first, clips) - _resampled(second, clips)
    return _interval(first.share - second.share, resampled)


def _resampled(counts: Counts, clips: Sequence[str]) -> npt.NDArray[np.float64]:
    """Returns the share of each resample of the clips, which are the same for equal numbers."""
    if not clips:
        raise ValueError("no clips to resample")
    size = (_NUM_RESAMPLES, len(clips))
    draws = np.random.default_rng(0).integers(len(clips), size=size)
    hits = np.array([counts.hits[clip] for clip in clips])
    totals = np.array([counts.totals[clip] for clip in clips])
    shares: npt.NDArray[np.float64] = hits[draws].sum(1) / np.maximum(totals[draws].sum(1), 1e-12)
    return shares


def _interval(mean: float, resampled: npt.NDArray[np.float64]) -> Interval:
    low, high = np.quantile(resampled, (0.025, 0.975))
    found = {"mean": mean, "low": float(low), "high": float(high)}
    return {name: round(value, 5) for name, value in found.items()}
