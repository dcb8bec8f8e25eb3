"""The default policy: draft lengths from measured times and acceptance, or no drafting at all.

docs/algorithms.md, "Which mode, and who decides", tells when a sequence drafts, rests and tries the
draft again, and what changes where draft and target share a GPU (``PairTimes.takes_turns``). A
trial costs nothing to a target on a device of its own.
"""

from collections.abc import Sequence

from hippo.speculation.estimates import Acceptance, Lengths, PairTimes, best_lengths
from hippo.types import TARGET_ONLY, Block, Pace, StepLimits, Verdict

_WORTH_DRAFTING = 1.05  # expected speedup from which on drafting begins
_NUM_TRIED = 5  # draft tokens that a trial compares, and forwards that prove drafting worth it
_FORWARD_MEMORY = 0.9  # weight of a forward in the measured speedup, relative to the next forward
_EXPECTED_FORWARDS = 3  # weight of the expected speedup when drafting begins
_FIRST_PAUSE, _PAUSE_GROWTH, _LONGEST_PAUSE = 16, 3, 512  # tokens
_LONGEST_DRAFTING = 2  # times the expected time, after which the target waits no longer
_NEAR = 1.5  # a number of the pace changes only by more than this factor
_TRIAL = Pace(max_ahead=2, block_size=2)  # the target verifies nothing


class AdaptivePolicy:
    """Chooses the pace of one sequence, with at most ``max_draft_tokens`` in a target forward.

    All sequences of one pair of services share ``times`` and add their measurements to it.
    """

    def __init__(self, max_draft_tokens: int, times: PairTimes | None = None) -> None:
        self._max_draft_tokens = max_draft_tokens
        self._times = times or PairTimes()
        self._acceptance = self._times.acceptance.of_next_sequence()
        self._rejected_ns: int | None = None  # time of the last rejection, until the next block
        self._pause = _FIRST_PAUSE  # length of the next rest in tokens
        self._num_paused = 0  # tokens to settle before the rest ends
        self._num_compared = 0  # draft tokens compared in this trial
        self._num_forwards = 0  # since drafting began
        self._forward_tokens = self._forward_ns = 0.0  # decayed sums over these forwards
        # The first answer of a pair begins with a trial, which measures the times.
        self._is_drafting = False  # False: the sequence rests or is on trial
        self.pace = _TRIAL
        if self._times.is_known:
            lengths = self._best_lengths()
            if lengths.speedup >= _WORTH_DRAFTING:
                self._start_drafting(lengths)
            else:
                self._start_rest()

    def observe_block(self, block: Block, outcomes: Sequence[bool], now_ns: int) -> None:
        """Updates the draft's times and the acceptance rate from a block of the current run."""
        step = self._times.draft_step
        if block.step_ns:
            step.observe_time(block.step_ns)
        if block.is_from_branch:
            self._rejected_ns = None  # the draft had begun before
        if self._rejected_ns is not None:
            steps_ns = (len(block.token_ids) - 1) * step.value
            self._times.restart.observe_time(max(now_ns - self._rejected_ns - steps_ns, 1.0))
            self._rejected_ns = None
        self._learn_outcomes(outcomes)
        self._review_mode(outcomes)

    def observe_verdict(self, verdict: Verdict, outcomes: Sequence[bool], now_ns: int) -> None:
        """Updates the target's times and the acceptance rate, then reviews mode and pace."""
        self._learn_outcomes(outcomes)
        if False in outcomes:
            self._rejected_ns = now_ns
        timing = verdict.timing
        if verdict.start_index > 0 and timing.forward_ns:  # not the prefill
            # On a shared device the draft of a trial slows the target down.
            is_slowed = self._times.takes_turns and self.pace is _TRIAL
            if not (is_slowed and self._times.forwards.is_known):
                self._times.observe_forward(timing)
            if self._is_drafting:
                self._num_forwards += 1
                self._forward_tokens *= _FORWARD_MEMORY
                self._forward_tokens += len(verdict.token_ids)
                self._forward_ns *= _FORWARD_MEMORY
                self._forward_ns += timing.forward_ns + timing.wait_ns
        if self._num_paused > 0:
            self._num_paused -= len(verdict.token_ids)
            if self._num_paused <= 0:
                self._start_trial()
        self._review_mode(outcomes)

    def observe_broken_run(self, outcomes: Sequence[bool], *, is_start: bool) -> None:
        """Updates the acceptance rates of reused tokens, whether or not the target reused them."""
        self._times.observe_reuse(outcomes, is_start=is_start)

    def _learn_outcomes(self, outcomes: Sequence[bool]) -> None:
        self._acceptance.observe_outcomes(outcomes)
        self._times.acceptance.observe_outcomes(outcomes)
        self._num_compared += len(outcomes)

    def _review_mode(self, outcomes: Sequence[bool]) -> None:
        if not self._times.is_known or self._num_paused > 0:
            return
        if self._is_drafting:
            lengths = self._best_lengths()
            # The expected speedup counted as some forwards before the first, because a few in a
            # row often settle few tokens.
            measured = self._forward_tokens * self._times.one_row_ns / self._forward_ns
            if min(lengths.speedup, measured) < 1:
                self._start_rest()
                return
            if self._num_forwards >= _NUM_TRIED and measured >= _WORTH_DRAFTING:
                self._pause = _FIRST_PAUSE
            self.pace = self._make_pace(lengths)
        elif outcomes:
            lengths = self._best_lengths()
            if outcomes[-1] and lengths.speedup >= _WORTH_DRAFTING:
                self._start_drafting(lengths)
            elif self._num_compared >= _NUM_TRIED:
                self._start_rest()

    def _best_lengths(self) -> Lengths:
        return best_lengths(self._times, self._acceptance.rate, self._max_draft_tokens)

    def _start_drafting(self, lengths: Lengths) -> None:
        self._is_drafting = True
        self._num_forwards = 0
        self._forward_tokens = _EXPECTED_FORWARDS * lengths.speedup
        self._forward_ns = _EXPECTED_FORWARDS * self._times.one_row_ns
        self.pace = self._make_pace(lengths)

    def _start_rest(self) -> None:
        self._is_drafting = False
        self.pace = TARGET_ONLY
        self._num_paused = self._pause
        self._pause = min(_PAUSE_GROWTH * self._pause, _LONGEST_PAUSE)

    def _start_trial(self) -> None:
        # The draft may be another one now, so the known acceptance rate is only a prior.
        self.pace = _TRIAL
        self._num_compared = 0
        self._acceptance = Acceptance(self._acceptance.rate)

    def _make_pace(self, lengths: Lengths) -> Pace:
        """Returns the pace of ``lengths``; keeps numbers near the present ones, as each change
        costs a message to one side or both."""
        before = self.pace
        if self._times.takes_turns:
            num = _kept_if_near(before.conservative.max_draft_tokens, lengths.block)
            wait_ns = round(_LONGEST_DRAFTING * self._times.drafting_ns(num))
            wait_ns = _kept_if_near(before.conservative.wait_ns, wait_ns)
            limits = StepLimits(num, num, wait_ns)
            return Pace(optimistic=limits, conservative=limits, max_ahead=num, block_size=num)
        wait_ns = _kept_if_near(before.conservative.wait_ns, round(self._times.one_row_ns))
        most = _kept_if_near(before.conservative.max_draft_tokens, lengths.most)
        first = _kept_if_near(before.conservative.min_draft_tokens, lengths.first)
        return Pace(
            optimistic=StepLimits(1, most, wait_ns),
            conservative=StepLimits(min(first, most), most, wait_ns),
            max_ahead=2 * most,
            block_size=_kept_if_near(before.block_size, lengths.block),
            max_reused=_kept_if_near(before.max_reused, lengths.reused),
            max_branched=2 * most,
        )


def _kept_if_near(present: int, wanted: int) -> int:
    return present if present <= _NEAR * wanted and wanted <= _NEAR * present else wanted
