"""The gateway's side of one sequence: relays blocks and verdicts, and sets the pace."""

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
    """A message on the draft's stream."""

    message: Commit | Pace


Action = ToTarget | ToDraft


class Coordinator:
    """Returns for each event the messages to send, in this order.

    ``has_draft`` says whether the draft's stream is opened together with the target's. If not,
    the target decodes alone until ``on_draft_attached``. ``owes_block`` needs the sequence's
    ``max_tokens`` and ``end_token_ids``.
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
        self._is_drafting = False  # whether the draft's prefill is over
        self._committed: list[int] = []
        self._num_told = 0  # settled ids that were sent to the draft
        self.epoch = 0
        # The draft's last run.
        self._run_epoch = 0
        self._run_end = 0  # the index after the run's last token
        self._is_run_broken = False  # a token of the run was wrong
        self._is_run_complete = False  # the run's last token is an end token
        self._branches: dict[int, tuple[int, ...]] = {}  # of the run, by index
        self._is_branch_taken = False  # the draft goes on with a branch of the run
        self._num_repeated = 0  # tokens of the branch taken, with which the next run begins
        self._drafted: dict[int, int] = {}  # tokens of the run not compared yet, by index
        # What the last broken run had after its wrong token and is not compared yet, by index.
        self._broken_run: dict[int, int] = {}
        self._is_broken_run_new = False
        self._compared_end = 0  # all tokens before this index were compared, or never drafted
        self.is_finished = False
        self._was_conservative = False
        self.pace = self._wanted_pace()  # last set; at first, that of both Open messages
        self.stats = SpeculationStats()

    @property
    def committed_ids(self) -> Sequence[int]:
        """The settled ids so far. A draft that joins is opened with these ids and ``epoch``."""
        return self._committed

    @property
    def owes_block(self) -> bool:
        """Whether the draft should send another block, as far as the gateway knows.

        A draft rightly sends nothing before its prefill is over, while it rests, when it is
        ``max_ahead`` tokens ahead, after an end token, and before the last token, which is the
        target's. (A block's ``is_exhausted`` does not suffice: it ends with the next commit, which
        may be on its way already.) Before the target's first token, nothing waits for the draft.
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
        """Number of tokens of an unbroken run after the settled ids that the draft knows."""
        return 0 if self._is_run_broken else max(0, self._run_end - self._num_told)

    def on_block(self, block: Block, now_ns: int) -> list[Action]:
        """Handles a block from the draft."""
        stats = self.stats
        stats.num_blocks += 1
        num_new = self._count_new(block)
        stats.num_drafted_tokens += num_new
        stats.draft_wait_ns += block.wait_ns
        stats.draft_step_ns = block.step_ns or stats.draft_step_ns
        stats.drafting_ns += num_new * block.step_ns
        if self.is_finished or not self.has_draft or block.epoch < self.epoch:
            stats.num_stale_blocks += 1
            stats.num_dropped_tokens += len(block.token_ids)
            if not self.is_finished:
                stats.num_stale_tokens += len(block.token_ids)
            return []
        stats.relayed_end_index = block.start_index + len(block.token_ids)
        self._is_drafting = True
        self._enter_epoch(block.epoch)
        if not self._is_run_broken and block.token_ids:
            self._run_end = stats.relayed_end_index
            self._is_run_complete = not self._end_token_ids.isdisjoint(block.token_ids[-1:])
            for index, token_id in enumerate(block.token_ids, block.start_index):
                if index >= self._compared_end:
                    self._drafted[index] = token_id
            self._policy.observe_block(block, self._take_outcomes(), now_ns)
        return [ToTarget(block), *self._commit_to_draft(self._wanted_pace()), *self._update_pace()]

    def _count_new(self, block: Block) -> int:
        """Returns how many of the block's tokens, those of branches included, were not received
        before; keeps the branches."""
        num_new = len(block.token_ids)
        if block.is_from_branch:
            num_new -= min(self._num_repeated, num_new)
            self._num_repeated = 0
        for branch in block.branches:
            known = self._branches.get(branch.index, branch.token_ids[:1])
            num_new += max(len(branch.token_ids) - len(known), 0)
            self._branches[branch.index] = branch.token_ids
        return num_new

    def on_verdict(self, verdict: Verdict, now_ns: int) -> list[Action]:
        """Handles a verdict from the target."""
        self._count_verdict(verdict)
        self._committed.extend(verdict.token_ids)
        self._compare_broken_run()
        outcomes = self._take_outcomes()
        if verdict.epoch > self.epoch:  # an answer may end before the target rejects a wrong token
            self.stats.num_branches_taken += self._is_branch_taken
        self.epoch = max(self.epoch, verdict.epoch)
        self._enter_epoch(self.epoch)
        if verdict.finish_reason is not None:
            self.is_finished = True
            return []
        self._policy.observe_verdict(verdict, outcomes, now_ns)
        return [*self._commit_to_draft(self._wanted_pace()), *self._update_pace()]

    def on_draft_attached(self, num_committed: int = 0) -> list[Action]:
        """Handles a draft whose stream was opened with the first ``num_committed`` settled ids."""
        if self.is_finished:
            return []
        self.has_draft, self._is_drafting = True, False
        self._begin_run()
        self._num_told = num_committed
        pace = self._wanted_pace()
        actions = self._commit_to_draft(pace)
        self.pace = pace
        return [*actions, ToTarget(pace), ToDraft(pace)]

    def on_draft_ready(self) -> list[Action]:
        """Handles the end of the draft's prefill; from now on the target may wait for the draft."""
        if self.is_finished or not self.has_draft:
            return []
        self._is_drafting = True
        return self._update_pace()

    def on_draft_lost(self) -> list[Action]:
        """Handles the loss of the draft's stream; from now on the target decodes alone."""
        if not self.has_draft:
            return []
        self.has_draft = self._is_drafting = False
        self.stats.num_draft_losses += 1
        return [] if self.is_finished else self._update_pace()

    def _enter_epoch(self, epoch: int) -> None:
        """Begins a new run if ``epoch`` is later than that of the present run."""
        if epoch > self._run_epoch:
            self._run_epoch = epoch
            self._begin_run()

    def _begin_run(self) -> None:
        self._run_end = 0
        self._is_run_broken = self._is_run_complete = self._is_branch_taken = False
        self._drafted.clear()
        self._branches.clear()

    def _take_outcomes(self) -> list[bool]:
        """Compares drafted with settled tokens, each index once; returns whether each was right.

        At most the last outcome is False, because tokens after a wrong token are not compared.
        """
        outcomes = []
        for index in sorted(self._drafted):
            if index >= len(self._committed):
                break
            outcomes.append(self._drafted.pop(index) == self._committed[index])
            self._compared_end = index + 1
            if not outcomes[-1]:
                self._broken_run = {k: v for k, v in sorted(self._drafted.items()) if k > index}
                self._is_broken_run_new = True
                branch, settled = self._branches.get(index, ()), self._committed[index:]
                self._begin_run()
                is_taken = list(branch[: len(settled)]) == settled
                self._num_repeated = len(branch) - len(settled) if is_taken else 0
                self._is_run_broken, self._is_branch_taken = True, is_taken
                break
        return outcomes

    def _compare_broken_run(self) -> None:
        """Compares what the last broken run had after its wrong token with the settled tokens, up
        to its next wrong token, and tells the policy."""
        outcomes = []
        for index, token_id in list(self._broken_run.items()):
            if index >= len(self._committed):
                break
            del self._broken_run[index]
            outcomes.append(token_id == self._committed[index])
            if not outcomes[-1]:
                self._broken_run.clear()
                break
        if outcomes:
            self._policy.observe_broken_run(outcomes, is_start=self._is_broken_run_new)
            self._is_broken_run_new = False

    def _wanted_pace(self) -> Pace:
        if self._is_drafting:
            return self._policy.pace
        return _without_waits(self._policy.pace) if self.has_draft else TARGET_ONLY

    def _update_pace(self) -> list[Action]:
        """Returns the new pace for each side whose limits changed, and none for the other."""
        before, self.pace = self.pace, self._wanted_pace()
        actions: list[Action] = []
        if self.pace.for_target != before.for_target:
            actions.append(ToTarget(self.pace))
        if self.has_draft and self.pace.for_draft != before.for_draft:
            actions.append(ToDraft(self.pace))
        return actions

    def _commit_to_draft(self, pace: Pace) -> list[Action]:
        """Commits the ids that the draft does not know; nothing while the draft rests."""
        num_settled = len(self._committed)
        if not self.has_draft or pace.max_ahead == 0 or self._num_told == num_settled:
            return []
        commit = Commit(self.epoch, self._num_told, tuple(self._committed[self._num_told :]))
        self._num_told = num_settled
        return [ToDraft(commit)]

    def _count_verdict(self, verdict: Verdict) -> None:
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
        stats.num_reused_tokens += verdict.num_reused_tokens
        stats.num_accepted_reused += verdict.num_accepted_reused
        # They were counted as dropped with their run.
        num_used = min(verdict.num_accepted_reused, stats.num_behind_rejection_tokens)
        stats.num_behind_rejection_tokens -= num_used
        stats.num_dropped_tokens -= num_used
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
        if verdict.num_draft_tokens + verdict.num_reused_tokens == 0:
            stats.num_one_row_forwards += 1
            stats.one_row_ns += timing.forward_ns
            stats.target_only_ns += timing.forward_ns + timing.wait_ns
        elif verdict.is_conservative:
            stats.conservative_ns += timing.forward_ns + timing.wait_ns
        else:
            stats.optimistic_ns += timing.forward_ns + timing.wait_ns

    def _count_dropped(self, verdict: Verdict) -> None:
        """Counts dropped tokens by reason; tokens dropped at the answer's end have no count of
        their own."""
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
    """Returns ``pace`` for a target that does not wait, as a draft's prefill may take any time."""
    return replace(
        pace,
        optimistic=_without_wait(pace.optimistic),
        conservative=_without_wait(pace.conservative),
    )


def _without_wait(limits: StepLimits) -> StepLimits:
    # Without min_draft_tokens there is no wait, so wait_ns stays and no message is needed.
    return replace(limits, wait_ns=0) if limits.min_draft_tokens else limits
