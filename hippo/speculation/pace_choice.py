"""The adaptive policy's choice among paces, from what was measured.

Three numbers: how many draft tokens the idle target waits for after a rejection, how many it
verifies at most in one forward, and how many the draft sends at a time. The first two are chosen by
the expected rate over one cycle from rejection to rejection
(:func:`hippo.speculation.estimates.expected_rate`), at the present load: the more sequences share
the target's forwards, the more a row costs against what it saves. The third follows from what a
message costs: nothing that counts where the draft's processor has no other work, but where gateway
and client share it, each block, and each verdict that a block makes possible, holds the draft up.
"""

from __future__ import annotations

import functools
import math

from hippo.speculation.estimates import LOADED, Acceptance, PairTimes, expected_rate
from hippo.types import Pace, StepLimits

_MS = 1_000_000
_FIRST_CHOICES = (0, 1, 2, 3, 4, 6, 8)
_MOST_CHOICES = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32)
_FIRST_MOST = 4  # draft tokens in a forward, before it is known what rows cost or after a rest
_NUM_KNOWN = 24  # tokens compared of a draft before more is verified than is expected to pay,
_GOOD = 0.9  # unless it was right so often in other answers
_LENGTH_PRICE = 0.008  # share of the rate that a draft token of a block costs beside its row
_WORTH_CHANGING = 1.02  # expected gain below which the pace stays

_BLOCK_CHOICES = (1, 2, 3, 4, 6, 8, 12, 16)
_SHORT_BLOCK = 4  # up to which it hardly matters when a block comes
_MOST_BLOCK_LOADED = 8
_MESSAGE_NS = 0.2 * _MS  # what a block costs the draft at least: interpreter lock, caches
_MESSAGE_SHARE = 0.1  # of the draft's time that messages may take
_WHOLE = 0.5  # probability at least that all of a block is right
_BLOCK_STEPS = 3.0  # of one row that the target may have to wait for a block
_FIRST_WAIT_STEPS = 1.5  # of one row that it waits at most after a rejection
_BLOCK_WAIT_STEPS = 3.0  # after which it goes on alone
_NEAR = 1.5  # times a wait, up and down, within which it is kept


class PaceChoice:
    """The pace of one sequence with a draft that is trusted.

    ``times`` is what all sequences of the pair have measured, ``acceptance`` this one's.
    """

    def __init__(self, max_draft_tokens: int, times: PairTimes, acceptance: Acceptance) -> None:
        self._times = times
        self._acceptance = acceptance
        self._most_choices = [n for n in _MOST_CHOICES if n < max_draft_tokens]
        self._most_choices.append(max_draft_tokens)
        self._first_choices = [n for n in _FIRST_CHOICES if n <= max_draft_tokens]
        self._num_first = min(2, max_draft_tokens)
        self._num_most = min(_FIRST_MOST, max_draft_tokens)
        self._first_wait, self._block_wait = _Steady(), _Steady()
        self.context_length: int | None = None  # of the last forward

    @property
    def num_first(self) -> int:
        """Draft tokens that the target waits for after a rejection."""
        return self._num_first

    @property
    def one_row_ns(self) -> float:
        """A target step alone, by measurements without the draft where there are any."""
        costs = self._times.costs(self.context_length)
        if not self._is_loaded and costs.alone_ns:
            return costs.alone_ns
        return self.cost(1)

    def cost(self, num_rows: int) -> float:
        """Nanoseconds of a forward with so many rows here and at this load."""
        return self._times.cost(num_rows, context_length=self.context_length)

    def restart(self) -> None:
        """The draft is tried again: it may be another one."""
        self._num_first = 0
        self._num_most = min(_FIRST_MOST, self._most_choices[-1])

    def choose(self, *, is_anew: bool = False) -> float:
        """Moves to the best that is near, or (``is_anew``) the best of all; the speedup that is
        expected of it. Times must be known."""
        times, latency = self._times, self._times.latency
        most_rows = self._most_choices[-1] + 1
        costs = times.cost_table(most_rows, context_length=self.context_length)
        if not latency.first_token_ns:
            latency.first_token_ns = latency.draft_step_ns + 1.5 * _MS

        # Under load the rate hardly depends on the length of good blocks; but all sequences wait
        # for the rows of each, and what is behind a rejection was drafted in vain.
        price = _LENGTH_PRICE * (1 - 1 / max(times.num_sequences, 1.0))

        @functools.cache
        def rate(num_first: int, num_most: int) -> float:
            tokens = expected_rate(
                num_first,
                num_most,
                costs=costs,
                acceptance=self._acceptance,
                latency=latency,
                held_up_ns=0.0 if self._is_loaded else latency.message_ns,
            )
            return tokens * (1 - price * num_most)

        # No leap to forwards much larger than any that was measured.
        known_rows = times.known_rows(self.context_length)
        known = [n for n in self._most_choices if n < known_rows] or self._most_choices[:1]
        self._num_most = min(self._num_most, known[-1])
        self._num_first = min(self._num_first, self._num_most)
        most_choices = known if is_anew else _around(known, self._num_most, 2)
        first_choices = self._first_choices
        if not is_anew:
            first_choices = [0, *_around(first_choices, self._num_first, 1)]
        best = (self._num_first, self._num_most)
        best_rate = rate(*best) * _WORTH_CHANGING
        for num_most in most_choices:
            for num_first in set(first_choices):
                if num_first <= num_most and (value := rate(num_first, num_most)) > best_rate:
                    best_rate, best = value, (num_first, num_most)
        best_rate = rate(*best)
        self._num_first, self._num_most = best
        # Of equally good ones the longest whose last row is worth its time. It makes no difference
        # to what is expected to be queued, but now and then there is more, which would have to wait
        # for another forward.
        is_known = self._acceptance.num_trials >= _NUM_KNOWN or times.acceptance.rate >= _GOOD
        for num_most in most_choices if is_known and not self._is_loaded else ():
            row_ns = costs[num_most + 1] - costs[num_most]
            is_worth = self._acceptance.rate**num_most / best_rate >= row_ns
            if num_most > best[1] and is_worth and rate(best[0], num_most) >= best_rate:
                self._num_most = num_most
        return best_rate * self.one_row_ns

    def pace(self, *, is_heard: bool, is_proven: bool) -> Pace:
        """By the numbers as they are now.

        Waits are bounded, and there are none for a draft that is silent (not ``is_heard``); after a
        rejection none for one that was never right (not ``is_proven``).
        """
        latency, num_most = self._times.latency, self._num_most
        num_first = self._num_first if is_heard else 0
        step_ns = latency.draft_step_ns or 1.2 * _MS
        if latency.draft_step_ns and latency.first_token_ns:
            wait_ns = 2 * (latency.first_token_ns + num_first * step_ns)
        else:
            wait_ns = 10.0 * _MS
        one_row_ns = self.cost(1) if self._times.is_known else math.inf
        block_size = self._block_size(step_ns, one_row_ns)
        least, block_wait_ns = min(num_first, 1), min(wait_ns, one_row_ns) / 2
        wait_ns = min(wait_ns, _FIRST_WAIT_STEPS * one_row_ns)
        if block_size > _SHORT_BLOCK and is_heard:
            # Single rows meanwhile would cost more than they give: their verdicts hold it up too.
            least = 1
            block_wait_ns = min(1.5 * block_size * step_ns, _BLOCK_WAIT_STEPS * one_row_ns)
        first_wait = self._first_wait.near(wait_ns)
        block_wait = self._block_wait.near(block_wait_ns)
        return Pace(
            optimistic=StepLimits(least, num_most, block_wait),
            conservative=StepLimits(num_first * is_proven, num_most, first_wait),
            max_ahead=2 * num_most,
            block_size=block_size,
        )

    @property
    def _is_loaded(self) -> bool:
        return self._times.num_sequences >= LOADED

    def _block_size(self, step_ns: float, one_row_ns: float) -> int:
        """Small enough to be there in time, large enough not to cost the draft too much.

        Under load each of its steps gives a token to each of several sequences, and so messages,
        and the target has others to go on with.
        """
        message_ns = _MESSAGE_NS
        if self._is_loaded:
            most: float = max(_SHORT_BLOCK, min(_MOST_BLOCK_LOADED, self._num_most // 2))
        else:
            message_ns = max(message_ns, self._times.latency.message_ns)
            rate = min(max(self._acceptance.rate, 0.01), 0.995)
            num_whole = math.log(_WHOLE) / math.log(rate)
            in_time = max(_SHORT_BLOCK, _BLOCK_STEPS * one_row_ns / step_ns)
            most = min(num_whole, in_time)
        size = self._times.num_sequences * message_ns / (_MESSAGE_SHARE * step_ns)
        size = min(math.ceil(size), most, self._num_most)
        return max((n for n in _BLOCK_CHOICES if n <= size), default=1)


def _around(choices: list[int], choice: int, reach: int) -> list[int]:
    """A choice and its neighbours."""
    position = choices.index(choice)
    return choices[max(0, position - reach) : position + reach + 1]


class _Steady:
    """A bound that stays while it is about right: with each that changes, messages are sent."""

    def __init__(self) -> None:
        self._kept = 0

    def near(self, wanted: float) -> int:
        """The one that was kept, if it is near enough."""
        if not self._kept / _NEAR <= wanted <= self._kept * _NEAR:
            self._kept = max(1, round(wanted))
        return self._kept
