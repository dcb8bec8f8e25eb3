"""Shares of tokens with bootstrap intervals over clips."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_NUM_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Interval:
    """A share with its 95 % bootstrap interval over clips."""

    mean: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of the interval's width."""
        return (self.high - self.low) / 2

    def as_dict(self) -> dict[str, float]:
        """Returns the interval for JSON, to five decimals."""
        return {
            "mean": round(self.mean, 5),
            "low": round(self.low, 5),
            "high": round(self.high, 5),
        }


@dataclass(slots=True)
class Counts:
    """Hits and totals by clip."""

    hits: dict[str, float]
    totals: dict[str, float]

    @classmethod
    def empty(cls) -> Counts:
        """Returns counts without clips."""
        return cls({}, {})

    def add_hits(self, clip: str, hits: float, total: float) -> None:
        """Adds hits and total to those of a clip."""
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
    hits, totals = _arrays(counts, sorted(counts.totals))
    draws = _draws(len(hits))
    shares = hits[draws].sum(1) / np.maximum(totals[draws].sum(1), 1e-12)
    return _interval(counts.share, shares)


def difference(first: Counts, second: Counts) -> Interval:
    """Returns the first share minus the second, with both resampled on the same clips.

    Raises ValueError unless both count the same clips.
    """
    clips = sorted(first.totals)
    if clips != sorted(second.totals):
        raise ValueError("a paired difference needs the same clips on both sides")
    draws = _draws(len(clips))
    shares = []
    for counts in (first, second):
        hits, totals = _arrays(counts, clips)
        shares.append(hits[draws].sum(1) / np.maximum(totals[draws].sum(1), 1e-12))
    return _interval(first.share - second.share, shares[0] - shares[1])


def _arrays(
    counts: Counts, clips: Sequence[str]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    return (
        np.array([counts.hits[clip] for clip in clips]),
        np.array([counts.totals[clip] for clip in clips]),
    )


def _draws(count: int) -> npt.NDArray[np.int64]:
    if count == 0:
        raise ValueError("no clips to resample")
    return np.random.default_rng(0).integers(count, size=(_NUM_RESAMPLES, count))


def _interval(mean: float, resampled: npt.NDArray[np.float64]) -> Interval:
    low, high = np.quantile(resampled, (0.025, 0.975))
    return Interval(mean, float(low), float(high))
