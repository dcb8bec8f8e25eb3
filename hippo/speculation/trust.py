"""When to stop believing a draft, by what it cost and not by what was expected of it."""

from __future__ import annotations

import math

_SURPRISE = 0.001  # as likely were so many first tokens wrong in a row, were it as right as before
_LEAST_WRONG, _MOST_WRONG = 2, 6  # bounds of that number
_WRONG_TRIES = 3  # in a row, of a draft that was never right
_BEARABLE_STEPS = 2.5  # of one row that wrong tokens may have cost, in a row
_NUM_FORWARDS, _DECAY = 8, 0.93  # that a measured speedup rests on


class Trust:
    """One sequence's record of late; begins anew with each of the policy's modes."""

    def __init__(self) -> None:
        self._rate: float | None = None  # the acceptance when the last right token was compared
        self.restart()

    def restart(self) -> None:
        """Forgets all but how often the draft was right before."""
        self.is_right = False  # the last token that was compared
        self.num_wrong = 0  # first tokens of runs, in a row
        self._lost_ns = 0.0  # to what was verified in vain meanwhile
        self._num_forwards = 0
        self._tokens = 0.0
        self._spent_ns = 0.0

    def observe(self, *, is_right: bool, is_first: bool, rate: float) -> None:
        """A token was compared, or several that were right; ``rate`` is the acceptance with it."""
        self.is_right = is_right
        if is_right:
            self.num_wrong = 0
            self._lost_ns = 0.0
            self._rate = rate
        else:
            self.num_wrong += is_first

    def observe_forward(
        self, num_tokens: int, *, num_accepted: int, spent_ns: float, one_row_ns: float
    ) -> None:
        """A forward that might have had draft tokens, with the wait before it."""
        self._num_forwards += 1
        self._tokens = self._tokens * _DECAY + num_tokens
        self._spent_ns = self._spent_ns * _DECAY + spent_ns
        if num_accepted == 0:
            self._lost_ns += spent_ns - one_row_ns

    def is_lost(self, *, is_proven: bool, one_row_ns: float) -> bool:
        """Whether too many runs in a row were wrong at once, or cost too much; a single one is
        enough if the draft was never right."""
        if self.num_wrong == 0:
            return False
        is_dear = self._lost_ns > _BEARABLE_STEPS * one_row_ns
        return not is_proven or self.num_wrong >= self._num_bearable or is_dear

    def is_try_over(self, *, is_proven: bool) -> bool:
        """Whether a try that costs nothing has shown enough."""
        return self.num_wrong >= (2 * self._num_bearable if is_proven else _WRONG_TRIES)

    @property
    def _num_bearable(self) -> int:
        """First tokens of runs that may be wrong in a row."""
        if self._rate is None:
            return _LEAST_WRONG
        surprise = math.log(_SURPRISE) / math.log(1 - min(max(self._rate, 0.01), 0.99))
        return min(max(math.ceil(surprise), _LEAST_WRONG), _MOST_WRONG)

    def speedup(self, one_row_ns: float) -> float:
        """Of the last forwards over steps of one row; infinite while there are too few."""
        if self._num_forwards < _NUM_FORWARDS:
            return math.inf
        return self._tokens * one_row_ns / self._spent_ns
