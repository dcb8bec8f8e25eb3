"""The default policy: draft lengths from measured times and acceptance, or no drafting at all.

While it drafts, the lengths are those of the highest expected rate
(:func:`hippo.speculation.estimates.best_lengths`). Drafting stops as soon as it is expected to be,
or was measured to be, slower than target-only decoding. The sequence then rests: it settles a
number of tokens without a draft, and afterwards lets the draft say what it would have drafted while
the target goes on with single rows. That trial costs nothing, and what it shows decides whether
drafting begins again.
"""

from __future__ import annotations

from collections.abc import Sequence

from hippo.speculation.estimates import Acceptance, Lengths, PairTimes, best_lengths
from hippo.types import TARGET_ONLY, Block, Pace, StepLimits, Verdict

_WORTH_DRAFTING = 1.05  # expected speedup from which on drafting begins
_NUM_TRIED = 5  # draft tokens that a trial compares, and forwards that a measured speedup needs
_FORWARD_MEMORY = 0.9  # a forward's weight in the measured speedup when one more has passed
_FIRST_PAUSE, _PAUSE_GROWTH, _LONGEST_PAUSE = 16, 3, 512  # tokens
_NEAR = 1.5  # factor up and down within which a number of the pace stays as it is
_TRIAL = Pace(max_ahead=2, block_size=2)  # the target verifies nothing


class AdaptivePolicy:
    """Chooses the pace of one sequence as it goes; ``max_draft_tokens`` bounds a forward.

    ``times`` is what other sequences of the same pair have measured and go on measuring.
    """

    def __init__(self, max_draft_tokens: int, times: PairTimes | None = None) -> None:
        self._max_draft_tokens = max_draft_tokens
        self._times = times or PairTimes()
        self._acceptance = Acceptance(self._times.acceptance.rate)
        self._rejected_ns: int | None = None  # when a rejection passed, until a block follows
        self._pause = _FIRST_PAUSE  # of the next rest
        self._num_paused = 0  # tokens still to settle before the draft is tried
        self._num_compared = 0  # draft tokens of this trial
        self._num_forwards = 0  # since drafting began
        self._forward_tokens = self._forward_ns = 0.0  # of these, decayed
        # The first answer of all begins with a trial, so that the times become known.
        self._is_drafting = False  # else the target goes on alone; the draft rests, or is on trial
        self.pace = _TRIAL
        if self._times.is_known:
            lengths = self._best_lengths()
            if lengths.speedup >= _WORTH_DRAFTING:
                self._draft(lengths)
            else:
                self._rest()

    def observe_block(self, block: Block, outcomes: Sequence[bool], now_ns: int) -> None:
        """Learns the draft's times and acceptance from a block of the run in progress."""
        step = self._times.draft_step
        if block.step_ns:
            step.observe(block.step_ns)
        if self._rejected_ns is not None:
            steps_ns = (len(block.token_ids) - 1) * step.value
            self._times.restart.observe(max(now_ns - self._rejected_ns - steps_ns, 1.0))
            self._rejected_ns = None
        self._learn(outcomes)
        self._review(outcomes)

    def observe_verdict(self, verdict: Verdict, outcomes: Sequence[bool], now_ns: int) -> None:
        """Learns the target's times and acceptance, and reviews mode and pace."""
        self._learn(outcomes)
        if False in outcomes:
            self._rejected_ns = now_ns
        timing = verdict.timing
        if verdict.start_index > 0 and timing.forward_ns:  # else it was the prefill
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
                self._try()
        self._review(outcomes)

    def _learn(self, outcomes: Sequence[bool]) -> None:
        self._acceptance.observe(outcomes)
        self._times.acceptance.observe(outcomes)
        self._num_compared += len(outcomes)

    def _review(self, outcomes: Sequence[bool]) -> None:
        """Changes the mode if what was learnt says so, and the pace with it."""
        if not self._times.is_known or self._num_paused > 0:
            return
        if self._is_drafting:
            lengths = self._best_lengths()
            measured = self._measured_speedup
            if min(lengths.speedup, measured or lengths.speedup) < 1:
                self._rest()
                return
            if measured is not None and measured >= _WORTH_DRAFTING:
                self._pause = _FIRST_PAUSE
            self.pace = self._make_pace(lengths)
        elif outcomes:
            lengths = self._best_lengths()
            if outcomes[-1] and lengths.speedup >= _WORTH_DRAFTING:
                self._draft(lengths)
            elif self._num_compared >= _NUM_TRIED:
                self._rest()

    def _best_lengths(self) -> Lengths:
        return best_lengths(self._times, self._acceptance.rate, self._max_draft_tokens)

    @property
    def _measured_speedup(self) -> float | None:
        """Speedup of the last forwards over target-only decoding; None while there are too few."""
        if self._num_forwards < _NUM_TRIED:
            return None
        return self._forward_tokens * self._times.one_row_ns / self._forward_ns

    def _draft(self, lengths: Lengths) -> None:
        self._is_drafting = True
        self._num_forwards = 0
        self._forward_tokens = self._forward_ns = 0.0
        self.pace = self._make_pace(lengths)

    def _rest(self) -> None:
        self._is_drafting = False
        self.pace = TARGET_ONLY
        self._num_paused = self._pause
        self._pause = min(_PAUSE_GROWTH * self._pause, _LONGEST_PAUSE)

    def _try(self) -> None:
        """The draft may be another one by now: what is known of it counts as the prior alone."""
        self.pace = _TRIAL
        self._num_compared = 0
        self._acceptance = Acceptance(self._acceptance.rate)

    def _make_pace(self, lengths: Lengths) -> Pace:
        """Numbers that are near those of the present pace stay: each change costs two messages."""
        before = self.pace
        wait_ns = _settled(before.conservative.wait_ns, round(self._times.one_row_ns))
        most = _settled(before.conservative.max_draft_tokens, lengths.most)
        first = _settled(before.conservative.min_draft_tokens, lengths.first)
        return Pace(
            optimistic=StepLimits(1, most, wait_ns),
            conservative=StepLimits(min(first, most), most, wait_ns),
            max_ahead=2 * most,
            block_size=_settled(before.block_size, lengths.block),
        )


def _settled(kept: int, wanted: int) -> int:
    return kept if kept <= _NEAR * wanted and wanted <= _NEAR * kept else wanted
