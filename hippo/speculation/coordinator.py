"""The gateway's side of one sequence: relays blocks and verdicts, and sets the pace of both."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from hippo.speculation.policies import Policy
from hippo.speculation.stats import SpeculationStats
from hippo.types import TARGET_ONLY, Block, Commit, Pace, StepLimits, Verdict


@dataclass(frozen=True, slots=True)
class ToTarget:
    """A message on the target's stream."""

    message: Block | Pace


@dataclass(frozen=True, slots=True)
class ToDraft:
    """A message on the draft's stream, if one is attached."""

    message: Commit | Pace


Action = ToTarget | ToDraft


class Coordinator:
    """Decides, event by event, what is sent next; actions are to be carried out in order.

    ``has_draft`` tells whether the draft's stream is opened together with the target's; without
    it the target goes alone until ``on_draft_attached``. ``max_tokens`` and ``end_token_ids`` are
    the sequence's, for ``owes_block``.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        has_draft: bool = True,
        max_tokens: int = sys.maxsize,
        end_token_ids: Collection[int] = (),
    ) -> None:
        self._policy = policy
        self._max_tokens = max_tokens
        self._end_token_ids = frozenset(end_token_ids)
        self.has_draft = has_draft
        self._is_drafting = False  # its prefill is over
        self._committed: list[int] = []
        self._num_told = 0  # settled ids that the draft knows of
        self.epoch = 0
        # The run that the draft has sent last.
        self._run_epoch = 0
        self._run_end = 0  # the index after its last token
        self._is_run_broken = False  # a token of it was wrong
        self._is_run_complete = False  # its last token is an end token
        self._drafted: dict[int, int] = {}  # its tokens by index that were not compared yet
        self._compared_end = 0  # all tokens before this index were compared, or never drafted
        self.is_finished = False
        self._was_conservative = False
        self.pace = self._wanted_pace()  # last set; at first, the one for both Opens
        self.stats = SpeculationStats()

    @property
    def committed_ids(self) -> Sequence[int]:
        """The settled ids so far; with ``epoch``, what a draft that joins is opened with."""
        return self._committed

    @property
    def owes_block(self) -> bool:
        """Whether the draft has all that it needs to say more, as far as is known here.

        A draft is silent in good order before its prefill is over, while it rests, as far ahead as
        it may go, behind an end token, and where the target gives the last token itself. (The
        block's ``is_exhausted`` says less: it holds until the next commit, which may be on its way
        already.) Before the target's first token nobody waits for the draft.
        """
        if not self._is_drafting or not self._committed:
            return False
        if max(self._num_told, self._run_end) >= self._max_tokens - 1:
            return False
        if self._is_run_complete:
            return False
        return self._num_ahead < self.pace.max_ahead

    @property
    def _num_ahead(self) -> int:
        """Tokens of an unbroken run behind what the draft knows to be settled."""
        return 0 if self._is_run_broken else max(0, self._run_end - self._num_told)

    def on_block(self, block: Block, now_ns: int) -> list[Action]:
        """A block came from the draft."""
        stats = self.stats
        stats.num_blocks += 1
        stats.num_drafted_tokens += len(block.token_ids)
        stats.draft_wait_ns += block.wait_ns
        stats.draft_step_ns = block.step_ns or stats.draft_step_ns
        stats.drafting_ns += len(block.token_ids) * block.step_ns
        if self.is_finished or not self.has_draft or block.epoch < self.epoch:
            stats.num_stale_blocks += 1
            stats.num_dropped_tokens += len(block.token_ids)
            if not self.is_finished:
                stats.num_stale_tokens += len(block.token_ids)
            return []
        stats.relayed_end_index = block.start_index + len(block.token_ids)
        self._is_drafting = True
        self._enter(block.epoch)
        if not self._is_run_broken:
            self._run_end = stats.relayed_end_index
            self._is_run_complete = not self._end_token_ids.isdisjoint(block.token_ids[-1:])
            for index, token_id in enumerate(block.token_ids, block.start_index):
                if index >= self._compared_end:
                    self._drafted[index] = token_id
            self._policy.observe_block(block, self._take_outcomes(), now_ns)
        return [ToTarget(block), *self._tell_draft(self._wanted_pace()), *self._update_pace()]

    def on_verdict(self, verdict: Verdict, now_ns: int) -> list[Action]:
        """A verdict came from the target."""
        self._count(verdict)
        self._committed.extend(verdict.token_ids)
        outcomes = self._take_outcomes()
        self.epoch = max(self.epoch, verdict.epoch)
        self._enter(self.epoch)
        if verdict.finish_reason is not None:
            self.is_finished = True
            return []
        self._policy.observe_verdict(verdict, outcomes, now_ns)
        return [*self._tell_draft(self._wanted_pace()), *self._update_pace()]

    def on_draft_attached(self, num_committed: int = 0) -> list[Action]:
        """A draft's stream was opened with the first ``num_committed`` settled ids."""
        if self.is_finished:
            return []
        self.has_draft, self._is_drafting = True, False
        self._begin_run()
        self._num_told = num_committed
        pace = self._wanted_pace()
        actions = self._tell_draft(pace)
        self.pace = pace
        return [*actions, ToTarget(pace), ToDraft(pace)]

    def on_draft_ready(self) -> list[Action]:
        """The draft's prefill is over: from here on the target may wait for it."""
        if self.is_finished or not self.has_draft:
            return []
        self._is_drafting = True
        return self._update_pace()

    def on_draft_lost(self) -> list[Action]:
        """The draft's stream is gone; the target goes alone."""
        if not self.has_draft:
            return []
        self.has_draft = self._is_drafting = False
        self.stats.num_draft_losses += 1
        return [] if self.is_finished else self._update_pace()

    def _enter(self, epoch: int) -> None:
        """A run of a later epoch has begun."""
        if epoch > self._run_epoch:
            self._run_epoch = epoch
            self._begin_run()

    def _begin_run(self) -> None:
        self._run_end = 0
        self._is_run_broken = self._is_run_complete = False
        self._drafted.clear()

    def _take_outcomes(self) -> list[bool]:
        """Compares what was drafted with what is settled, each index once: was each right?

        At most the last is wrong: what was drafted behind a wrong token says nothing.
        """
        outcomes = []
        for index in sorted(self._drafted):
            if index >= len(self._committed):
                break
            outcomes.append(self._drafted.pop(index) == self._committed[index])
            self._compared_end = index + 1
            if not outcomes[-1]:
                self._begin_run()
                self._is_run_broken = True
                break
        return outcomes

    def _wanted_pace(self) -> Pace:
        if self._is_drafting:
            return self._policy.pace
        return _without_waits(self._policy.pace) if self.has_draft else TARGET_ONLY

    def _update_pace(self) -> list[Action]:
        """Tells each side what has changed for it: a message costs both of its ends."""
        before, self.pace = self.pace, self._wanted_pace()
        actions: list[Action] = []
        if self.pace.for_target != before.for_target:
            actions.append(ToTarget(self.pace))
        if self.has_draft and self.pace.for_draft != before.for_draft:
            actions.append(ToDraft(self.pace))
        return actions

    def _tell_draft(self, pace: Pace) -> list[Action]:
        """Commits the draft has not heard of; held back while it is not to draft anyway."""
        num_settled = len(self._committed)
        if not self.has_draft or pace.max_ahead == 0 or self._num_told == num_settled:
            return []
        commit = Commit(self.epoch, self._num_told, tuple(self._committed[self._num_told :]))
        self._num_told = num_settled
        return [ToDraft(commit)]

    def _count(self, verdict: Verdict) -> None:
        stats, timing = self.stats, verdict.timing
        num_tokens = len(verdict.token_ids)
        stats.num_output_tokens += num_tokens
        self._count_dropped(verdict)
        if verdict.epoch > self.epoch:
            stats.num_rejections += verdict.epoch - self.epoch
            # The verdict's last token corrects the run; the next one begins after it.
            stats.run_lengths.append(stats.open_run_length + num_tokens)
            stats.open_run_length = 0
        elif self.pace.max_ahead > 0:
            stats.open_run_length += num_tokens
        stats.target_wait_ns += timing.wait_ns
        if verdict.start_index == 0:
            stats.prefill_ns += timing.forward_ns
            return
        stats.num_forwards += 1
        stats.num_draft_tokens += verdict.num_draft_tokens
        stats.num_accepted_tokens += verdict.num_accepted_tokens
        stats.forward_ns += timing.forward_ns
        while len(stats.verified_per_position) < verdict.num_draft_tokens:
            stats.verified_per_position.append(0)
            stats.accepted_per_position.append(0)
        for position in range(verdict.num_draft_tokens):
            stats.verified_per_position[position] += 1
            stats.accepted_per_position[position] += position < verdict.num_accepted_tokens
        if verdict.is_conservative != self._was_conservative:
            self._was_conservative = verdict.is_conservative
            stats.num_mode_switches += 1
        if verdict.num_draft_tokens == 0:
            stats.num_one_row_forwards += 1
            stats.one_row_ns += timing.forward_ns
            stats.target_only_ns += timing.forward_ns + timing.wait_ns
        elif verdict.is_conservative:
            stats.conservative_ns += timing.forward_ns + timing.wait_ns
        else:
            stats.optimistic_ns += timing.forward_ns + timing.wait_ns

    def _count_dropped(self, verdict: Verdict) -> None:
        """Why the verifier dropped what it dropped; what the answer's end made useless has no
        count of its own."""
        stats, num_dropped = self.stats, verdict.num_dropped_tokens
        num_rejections = max(verdict.epoch - self.epoch, 0)
        num_rejected = min(num_rejections, num_dropped)
        stats.num_dropped_tokens += num_dropped
        stats.num_rejected_tokens += num_rejected
        if num_rejections:
            stats.num_behind_rejection_tokens += num_dropped - num_rejected
        elif verdict.finish_reason is None:
            stats.num_stale_tokens += num_dropped


def _without_waits(pace: Pace) -> Pace:
    """The same, but for a target that takes what is there: a prefill may take any time."""
    optimistic, conservative = _at_once(pace.optimistic), _at_once(pace.conservative)
    if (optimistic, conservative) == (pace.optimistic, pace.conservative):
        return pace
    return replace(pace, optimistic=optimistic, conservative=conservative)


def _at_once(limits: StepLimits) -> StepLimits:
    """Where nothing is waited for, ``wait_ns`` means nothing and stays."""
    return replace(limits, wait_ns=0) if limits.min_draft_tokens else limits
