"""The draft's time of a drafted token, as it reports it."""

from __future__ import annotations

_LOOK_BACK = 8  # steps
_OUTLIER = 3.0  # one step counts as so many times the mean at most: a stall is no step time
_CATCHING_UP = 8  # settled ids in a step that say that it did more than draft


class DraftTimeMean:
    """Running mean over the last steps of one sequence; knows no clock.

    A step that feeds many settled ids (after a rest, or a draft that joins in mid-answer) says
    nothing about drafting, and what was before it may have changed: the mean begins anew.
    """

    def __init__(self) -> None:
        self._mean_ns = 0.0
        self._mean_drafted = 0.0  # tokens of a step

    @property
    def token_ns(self) -> int:
        """Device time of a drafted token; 0 before the first."""
        return round(self._mean_ns / self._mean_drafted) if self._mean_drafted else 0

    def observe(self, duration_ns: float, *, num_drafted: int, num_settled: int) -> None:
        """A step gave so many tokens and was fed so many settled ids."""
        if num_settled > _CATCHING_UP:
            self._mean_ns = self._mean_drafted = 0.0
        elif num_drafted:
            if not self._mean_drafted:
                self._mean_ns, self._mean_drafted = duration_ns, num_drafted
                return
            counted_ns = min(duration_ns, _OUTLIER * self._mean_ns)
            self._mean_ns += (counted_ns - self._mean_ns) / _LOOK_BACK
            self._mean_drafted += (num_drafted - self._mean_drafted) / _LOOK_BACK
