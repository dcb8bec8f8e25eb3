"""The default policy: chooses the pace from measured step times, load, acceptance and latency.

While the draft is trusted, :mod:`hippo.speculation.pace_choice` chooses how long the blocks are.
Waiting for none at all is the cheap end of the scale: the target goes on alone while the draft
catches up. When even that promises nothing, or would not if every draft token were right, drafting
stops, and is tried again after 16, 48, 144, ... tokens.

A draft that is not trusted is tried at no cost: the target goes on with single rows, the draft says
what it would have said, and both are compared here. So it is as long as it was never right, after
a few rejections in a row at its very first token, and when it is tried again.
"""

from __future__ import annotations

import enum
import math

from hippo.speculation.estimates import Acceptance, PairTimes
from hippo.speculation.pace_choice import PaceChoice
from hippo.speculation.trials import Trials
from hippo.speculation.trust import Trust
from hippo.types import TARGET_ONLY, Block, Pace, Verdict

_RELAY_NS = 200_000  # what relaying one block takes
_WORTH_DRAFTING = 1.05  # expected speedup below which drafting stops
_TOO_SLOW = 0.8  # of a target step: a draft step of that length gains nothing, right as it may be
_ENOUGH_TRIALS = 5  # tokens to judge a draft by
_SURPRISING = 1.3  # times the expected time of a forward: the choice is made again
_LOSING = 0.97  # measured speedup of the last forwards: drafting stops
_LONGEST_TRY = 12  # forwards, without a single token to compare
_TRIED_AHEAD = 2
_UNTRUSTED = 0.4  # acceptance of other answers below which one begins with a try
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 512  # tokens
_PAUSE_GROWTH = 3


class Mode(enum.Enum):
    """What an adaptive sequence does with its draft."""

    GOING = "going"  # the target verifies what the draft says
    TRYING = "trying"  # the draft speaks, the target goes on alone, and both are compared
    RESTING = "resting"  # target-only


class AdaptivePolicy:
    """Chooses the pace of one sequence as it goes; ``max_draft_tokens`` bounds a forward.

    ``times`` is what other sequences of the same pair have measured and go on measuring.
    """

    def __init__(self, max_draft_tokens: int, times: PairTimes | None = None) -> None:
        self._times = times or PairTimes()
        self._acceptance = Acceptance(prior=self._times.acceptance.rate)
        self._trials = Trials()
        self._latency = self._times.latency
        self._choice = PaceChoice(max_draft_tokens, self._times, self._acceptance)
        self._is_first = True  # the next token compared is the first of a run
        self._trust = Trust()
        self._rejected_ns: int | None = None  # when a rejection passed, until a block follows
        self._num_until_choice = 2
        self._pause = _FIRST_PAUSE
        self._num_paused = 0  # tokens still to settle before drafting is tried again
        self._num_silent = 0  # forwards of a try without a token to compare
        self._is_heard = False  # a block has come since the target last waited in vain
        self._last_block_ns = 0
        self._is_timed = True  # the draft's step time is of this try, or of other answers
        # The first answer of all begins with a try, so that a step of one row is measured.
        self._mode = Mode.TRYING
        if self._times.is_known:
            self._choice.choose(is_anew=True)
            if self._is_too_slow:
                self._rest()
            elif self._times.acceptance.rate >= _UNTRUSTED:
                self._mode = Mode.GOING
        self._pace = self._make_pace()

    @property
    def pace(self) -> Pace:
        return self._pace

    @property
    def mode(self) -> Mode:
        return self._mode

    @property
    def acceptance_rate(self) -> float:
        """Running estimate of the share of draft tokens that are right."""
        return self._acceptance.rate

    @property
    def _is_tried(self) -> bool:
        """Whether enough draft tokens were compared to judge the draft."""
        return self._acceptance.num_trials >= _ENOUGH_TRIALS

    @property
    def _is_proven(self) -> bool:
        """Whether a draft token was right: before that, nothing is waited for after a rejection."""
        return self._acceptance.num_right > 0

    @property
    def _is_too_slow(self) -> bool:
        """Whether the draft could not even keep up with a target that goes alone."""
        step_ns = self._latency.draft_step_ns
        return self._is_timed and step_ns > _TOO_SLOW * self._choice.one_row_ns > 0

    def observe_block(self, block: Block, now_ns: int) -> None:
        """Learns the draft's step time, how long its correction takes, and what was right."""
        self._last_block_ns = now_ns
        if block.step_ns:
            self._latency.observe_step(block.step_ns)
            self._is_timed = True
        if self._mode is Mode.GOING and len(block.token_ids) >= self._pace.block_size:
            self._latency.observe_message(block.preempted_ns)
        is_answer = self._rejected_ns is not None and not self._trials.is_stale(block)
        if is_answer and not self._choice.num_first:  # else the target's own wait tells it better
            assert self._rejected_ns is not None
            num_more = len(block.token_ids) - 1
            delay_ns = now_ns - self._rejected_ns - num_more * self._latency.draft_step_ns
            self._latency.observe_first_token(delay_ns + _RELAY_NS)
        if is_answer:
            self._rejected_ns = None
        outcomes = self._trials.add_block(block)
        self._learn(outcomes)
        if not self._is_heard or outcomes or self._mode is Mode.TRYING:
            self._is_heard = True
            self._review()

    def observe_verdict(self, verdict: Verdict, now_ns: int) -> None:
        """Learns costs and acceptance, and chooses again now and then."""
        outcomes = self._trials.add_verdict(verdict)
        self._learn(outcomes)
        if False in outcomes:
            self._rejected_ns = now_ns
        if verdict.start_index > 0:
            self._learn_times(verdict)
            timing = verdict.timing
            waited_from_ns = now_ns - timing.forward_ns - timing.wait_ns
            is_in_vain = timing.wait_ns > 0 and not verdict.num_draft_tokens
            if is_in_vain and self._last_block_ns < waited_from_ns:
                self._is_heard = False
        self._num_until_choice -= 1
        if self._mode is Mode.RESTING:
            self._num_paused -= len(verdict.token_ids)
            if self._num_paused <= 0:
                self._try_again()
        elif self._mode is Mode.TRYING:
            self._num_silent = 0 if outcomes else self._num_silent + 1
        self._review()

    def _learn(self, outcomes: list[bool]) -> None:
        """``outcomes``: was each token right? At most the last was wrong."""
        num_right = sum(outcomes)
        for is_right, count in ((True, num_right), (False, len(outcomes) - num_right)):
            if not count:
                continue
            for acceptance in (self._acceptance, self._times.acceptance):
                acceptance.observe(is_right=is_right, is_first=self._is_first, count=count)
            self._trust.observe(
                is_right=is_right, is_first=self._is_first, rate=self._acceptance.rate
            )
            self._is_first = not is_right

    def _learn_times(self, verdict: Verdict) -> None:
        timing = verdict.timing
        if not timing.forward_ns:
            return
        num_rows = verdict.num_draft_tokens + 1
        self._choice.context_length = timing.context_length
        is_known = self._times.is_known
        expected_ns = self._choice.cost(num_rows) if is_known else math.inf
        self._times.observe_forward(num_rows, timing)
        if timing.forward_ns > _SURPRISING * expected_ns and num_rows > 1:
            self._num_until_choice = 0
        if self._mode is Mode.GOING:
            self._trust.observe_forward(
                len(verdict.token_ids),
                num_accepted=verdict.num_accepted_tokens,
                spent_ns=timing.forward_ns + timing.wait_ns,
                one_row_ns=self._choice.one_row_ns,
            )
        if self._mode is Mode.RESTING and num_rows == 1 and timing.num_sequences <= 1:
            self._times.observe_alone(timing)
        num_waited_for = self._pace.conservative.min_draft_tokens
        if verdict.is_conservative and num_waited_for and timing.wait_ns:
            num_more = min(num_waited_for, verdict.num_draft_tokens) - 1
            delay_ns = timing.wait_ns - num_more * self._latency.draft_step_ns
            self._latency.observe_first_token(delay_ns)

    def _review(self) -> None:
        """Changes the mode if what was learnt says so, and the pace with it."""
        if self._mode is Mode.TRYING:
            is_over = self._trust.is_try_over(is_proven=self._is_proven)
            if is_over or self._num_silent >= _LONGEST_TRY or self._is_too_slow:
                self._rest()
            elif self._trust.is_right and self._times.is_known:
                self._mode = Mode.GOING
                self._trust.restart()
                self._choice.choose()
                self._num_until_choice = min(self._num_until_choice, 2)
        elif self._mode is Mode.GOING:
            one_row_ns = self._choice.one_row_ns
            if self._is_too_slow or self._trust.speedup(one_row_ns) < _LOSING:
                self._rest()
            elif self._trust.is_lost(is_proven=self._is_proven, one_row_ns=one_row_ns):
                self._try()
            elif self._num_until_choice <= 0:
                self._num_until_choice = 6
                self._choose()
        self._pace = self._make_pace()

    def _choose(self) -> None:
        if not self._times.is_known:
            return
        gain = self._choice.choose()
        if self._is_tried:
            if gain < _WORTH_DRAFTING:
                self._rest()
            else:
                self._pause = _FIRST_PAUSE

    def _rest(self) -> None:
        self._mode = Mode.RESTING
        self._num_paused = self._pause
        self._pause = min(_PAUSE_GROWTH * self._pause, _LONGEST_PAUSE)

    def _try(self) -> None:
        self._mode = Mode.TRYING
        self._num_silent = 0
        self._trust.restart()

    def _try_again(self) -> None:
        self._try()
        self._acceptance.forget()
        self._is_timed = False
        self._is_first = True
        self._choice.restart()

    def _make_pace(self) -> Pace:
        if self._mode is Mode.RESTING:
            return TARGET_ONLY
        if self._mode is Mode.TRYING:
            return Pace(max_ahead=_TRIED_AHEAD, block_size=_TRIED_AHEAD)
        return self._choice.pace(is_heard=self._is_heard, is_proven=self._is_proven)
