"""The default policy: chooses the pace from measured step times, load, acceptance and latency.

Two numbers matter: how many draft tokens the idle target waits for after a rejection, and how
many it verifies at most in one forward. Both are chosen by the expected rate over one cycle from
rejection to rejection (:func:`hippo.speculation.estimates.expected_rate`), at the present load:
the more sequences share the target's forwards, the more a row costs against what it saves.

Waiting for none at all is the cheap end of the scale: the target goes on alone while the draft
catches up, and each of its tokens tells for free whether the draft would have been right. When
even that promises nothing, drafting stops, and is tried again after 16, 48, 144, ... tokens.
Nothing is waited for either while the draft has been wrong from its very first token on: that
first trial, during the prefills, is free.
"""

from __future__ import annotations

import math

from hippo.speculation.estimates import Acceptance, PairTimes, expected_rate
from hippo.types import TARGET_ONLY, Block, Pace, StepLimits, Verdict

_MS = 1_000_000
_FIRST_CHOICES = (0, 1, 2, 3, 4, 6, 8)
_MOST_CHOICES = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32)
_MESSAGE_NS = 0.2 * _MS  # what relaying one block takes from the draft's processor
_MESSAGE_SHARE = 0.1  # of the draft's time that relaying may take
_MOST_BLOCK, _MOST_BLOCK_LOADED = 4, 8
_LENGTH_PRICE = 0.008  # share of the rate that a draft token of a block costs beside its row
_LOADED = 1.5  # sequences in a forward from which on one is not alone
_WORTH_DRAFTING = 1.05  # expected speedup below which drafting stops
_WORTH_CHANGING = 1.02  # expected gain below which the pace stays
_NUM_PROBE_TRIALS = 5
_HOPELESS_TRIALS = 3  # none of them right
_MOST_PROBE_FORWARDS = 12
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 512  # tokens
_PAUSE_GROWTH = 3


def _around(choices: list[int], choice: int, reach: int) -> list[int]:
    """A choice and its neighbours."""
    position = choices.index(choice)
    return choices[max(0, position - reach) : position + reach + 1]


class AdaptivePolicy:
    """Chooses the pace of one sequence as it goes; ``max_draft_tokens`` bounds a forward.

    ``times`` is what other sequences of the same pair have measured and go on measuring.
    """

    def __init__(self, max_draft_tokens: int, times: PairTimes | None = None) -> None:
        self._times = times or PairTimes()
        self._acceptance = Acceptance(prior=self._times.acceptance.rate)
        self._latency = self._times.latency
        self._most_choices = [n for n in _MOST_CHOICES if n < max_draft_tokens]
        self._most_choices.append(max_draft_tokens)
        self._first_choices = [n for n in _FIRST_CHOICES if n <= max_draft_tokens]
        self._num_first = min(2, max_draft_tokens)
        self._num_most = max(n for n in self._most_choices if n <= 12)
        self._epoch = 0
        self._drafted_end = 0  # index after the last draft token of this epoch
        self._is_first = True  # the next token compared is the first of a run
        self._rejected_ns: int | None = None  # when a rejection passed, until a block follows
        self._num_until_choice = 2
        self._alone_ns = 0.0  # one row, the draft idle
        self._pause = _FIRST_PAUSE
        self._num_paused = 0  # tokens still to settle before drafting is tried again
        self._num_probe_forwards = 0
        self._is_probing = False
        self._is_heard = False  # a block has come since the target last waited in vain
        if self._times.is_known:
            self._pick(len(self._most_choices), len(self._first_choices))
        self._pace = self._make_pace()

    @property
    def pace(self) -> Pace:
        return self._pace

    @property
    def acceptance_rate(self) -> float:
        """Running estimate of the share of draft tokens that are right."""
        return self._acceptance.rate

    @property
    def _is_tried(self) -> bool:
        """Whether enough draft tokens were compared to judge the draft."""
        enough = _NUM_PROBE_TRIALS if self._is_proven else _HOPELESS_TRIALS
        return self._acceptance.num_trials >= enough

    @property
    def _is_proven(self) -> bool:
        """Whether a draft token was right: before that, nothing is waited for after a rejection."""
        return self._acceptance.num_right > 0

    def observe_block(self, block: Block, now_ns: int) -> None:
        """Learns the draft's step time, and how long its correction takes."""
        if block.step_ns:
            self._latency.observe_step(block.step_ns)
        if not self._is_heard:
            self._is_heard = True
            if self._pace != TARGET_ONLY and not self._is_probing:
                self._pace = self._make_pace()
        if block.epoch < self._epoch:
            return
        self._drafted_end = block.start_index + len(block.token_ids)
        if self._rejected_ns is not None:
            if self._num_first == 0:  # else the target's own wait tells it better
                num_more = len(block.token_ids) - 1
                delay_ns = now_ns - self._rejected_ns - num_more * self._latency.draft_step_ns
                self._latency.observe_first_token(delay_ns + _MESSAGE_NS)
            self._rejected_ns = None

    def observe_verdict(self, verdict: Verdict, now_ns: int) -> None:
        """Learns costs and acceptance, and chooses again now and then."""
        was_proven = self._is_proven
        self._learn_acceptance(verdict, now_ns)
        if (self._is_proven != was_proven or verdict.start_index == 0) and not self._num_paused:
            self._pace = self._trial_pace(4) if self._is_probing else self._make_pace()
        if verdict.start_index == 0:
            return
        self._learn_times(verdict)
        if self._is_heard and verdict.timing.wait_ns and not verdict.num_draft_tokens:
            self._is_heard = False
            if self._pace != TARGET_ONLY and not self._is_probing:
                self._pace = self._make_pace()
        if self._num_paused:
            self._num_paused = max(0, self._num_paused - len(verdict.token_ids))
            if self._num_paused == 0:
                self._probe()
            return
        if self._is_probing:
            self._num_probe_forwards += 1
            if not self._is_tried and self._num_probe_forwards < _MOST_PROBE_FORWARDS:
                return
            self._num_until_choice = 0
        if self._is_tried and not self._is_proven:
            self._num_until_choice = 0
        self._num_until_choice -= 1
        if self._num_until_choice <= 0:
            self._num_until_choice = 6
            self._choose()

    def _learn_acceptance(self, verdict: Verdict, now_ns: int) -> None:
        num_right = verdict.num_accepted_tokens
        num_rejections = verdict.epoch - self._epoch
        extra_index = verdict.start_index + len(verdict.token_ids) - 1
        if num_rejections == 0 and num_right < len(verdict.token_ids):
            num_right += self._drafted_end > extra_index  # it was held and compared
        for _ in range(num_right):
            self._learn(is_right=True)
        for _ in range(num_rejections):
            self._learn(is_right=False)
        if num_rejections:
            self._epoch = verdict.epoch
            self._drafted_end = 0
            self._rejected_ns = now_ns

    def _learn(self, *, is_right: bool) -> None:
        for acceptance in (self._acceptance, self._times.acceptance):
            acceptance.observe(is_right=is_right, is_first=self._is_first)
        self._is_first = not is_right

    def _learn_times(self, verdict: Verdict) -> None:
        timing = verdict.timing
        if not timing.forward_ns:
            return
        num_rows = verdict.num_draft_tokens + 1
        self._times.observe_forward(num_rows, timing)
        if self._num_paused and num_rows == 1 and timing.num_sequences <= 1:
            self._alone_ns += (timing.forward_ns - self._alone_ns) * (0.2 if self._alone_ns else 1)
        num_waited_for = self._pace.conservative.min_draft_tokens
        if verdict.is_conservative and num_waited_for and timing.wait_ns:
            num_more = min(num_waited_for, verdict.num_draft_tokens) - 1
            delay_ns = timing.wait_ns - num_more * self._latency.draft_step_ns
            self._latency.observe_first_token(delay_ns)

    def _choose(self) -> None:
        if not self._times.is_known:
            return
        gain = self._pick(2, 1)
        if self._is_tried and not (gain >= _WORTH_DRAFTING and self._is_proven):
            self._stop()
        else:
            if self._is_probing:
                self._is_probing = False
                self._pause = _FIRST_PAUSE
            self._pace = self._make_pace()

    def _pick(self, most_reach: int, first_reach: int) -> float:
        """Moves both numbers to the best within reach of where they are; the expected speedup."""
        times, latency = self._times, self._latency
        costs = times.cost_table(self._most_choices[-1] + 1)
        if not latency.first_token_ns:
            latency.first_token_ns = latency.draft_step_ns + 1.5 * _MS

        # Under load the rate hardly depends on the length of good blocks; but all sequences wait
        # for the rows of each, and what is behind a rejection was drafted in vain.
        price = _LENGTH_PRICE * (1 - 1 / max(times.num_sequences, 1.0))

        def rate(num_first: int, num_most: int) -> float:
            tokens = expected_rate(
                num_first, num_most, costs=costs, acceptance=self._acceptance, latency=latency
            )
            return tokens * (1 - price * num_most)

        best = (self._num_first, self._num_most)
        best_rate = rate(*best) * _WORTH_CHANGING
        for num_most in _around(self._most_choices, self._num_most, most_reach):
            for num_first in {0, *_around(self._first_choices, self._num_first, first_reach)}:
                if num_first <= num_most and (value := rate(num_first, num_most)) > best_rate:
                    best_rate, best = value, (num_first, num_most)
        self._num_first, self._num_most = best
        is_alone = times.num_sequences < _LOADED
        return rate(*best) * (self._alone_ns if is_alone and self._alone_ns else costs[1])

    def _stop(self) -> None:
        self._num_paused = self._pause
        self._pause = min(_PAUSE_GROWTH * self._pause, _LONGEST_PAUSE)
        self._is_probing = False
        self._pace = TARGET_ONLY

    def _probe(self) -> None:
        self._acceptance.forget()
        self._is_probing = True
        self._is_first = True
        self._num_probe_forwards = 0
        self._num_first = 0
        self._num_most = max(n for n in self._most_choices if n <= 4)
        self._pace = self._trial_pace(2)

    def _trial_pace(self, num_ahead: int) -> Pace:
        """Waits for nothing, and the draft does little that may be in vain."""
        limits = StepLimits(0, min(num_ahead, self._num_most), 0)
        return Pace(limits, limits, max_ahead=num_ahead, block_size=min(num_ahead, 4))

    def _make_pace(self) -> Pace:
        if self._acceptance.num_trials and not self._is_proven:
            return self._trial_pace(2)
        latency, num_first, num_most = self._latency, self._num_first, self._num_most
        if not self._is_heard:  # neither before its first block nor while it is silent
            num_first = 0
        if not (latency.draft_step_ns and latency.first_token_ns):
            wait_ns = 10.0 * _MS
        else:
            wait_ns = 2 * (latency.first_token_ns + num_first * latency.draft_step_ns)
        if self._times.costs.is_known:
            wait_ns = min(wait_ns, self._times.cost_table(1)[1])
        # Waits in steps of an eighth, so that the pace does not change with every measurement.
        wait_ns = int(2 ** (round(math.log2(max(wait_ns, 1)) * 4) / 4))
        step_ns = latency.draft_step_ns or 1.2 * _MS
        return Pace(
            optimistic=StepLimits(min(num_first, 1), num_most, wait_ns // 2),
            conservative=StepLimits(num_first * self._is_proven, num_most, wait_ns),
            max_ahead=2 * num_most,
            block_size=self._block_size(step_ns),
        )

    def _block_size(self, step_ns: float) -> int:
        """Small enough to be there in time, large enough not to cost the draft too much: under
        load each of its steps gives a token to each of several sequences, and so messages."""
        num_sequences = self._times.num_sequences
        most = _MOST_BLOCK
        if num_sequences >= _LOADED:
            most = max(most, min(_MOST_BLOCK_LOADED, self._num_most // 2))
        size = math.ceil(num_sequences * _MESSAGE_NS / (_MESSAGE_SHARE * step_ns))
        return max(1, min(size, most, self._num_most))
