"""The gateway's side of one sequence: relays blocks and verdicts, and sets the pace."""

import sys
from collections.abc import Collection
from dataclasses import dataclass, field, replace

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


@dataclass(slots=True)
class _DraftedRun:
    """What the draft sent from one rejection to the next."""

    epoch: int = 0
    end: int = 0  # the index after its last token
    is_broken: bool = False  # one of its tokens was wrong
    is_complete: bool = False  # its last token is an end token
    is_branch_taken: bool = False  # the draft goes on with one of its branches
    drafted: dict[int, int] = field(default_factory=dict)  # tokens not compared yet, by index
    branches: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by index

    def add_branches(self, block: Block) -> int:
        """Keeps the block's branches; returns how many of their tokens are new."""
        num_new = 0
        for branch in block.branches:
            known = self.branches.get(branch.index, branch.token_ids[:1])
            num_new += max(len(branch.token_ids) - len(known), 0)
            self.branches[branch.index] = branch.token_ids
        return num_new


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
        # Settled so far. A draft that joins is opened with these ids and ``epoch``.
        self.committed_ids: list[int] = []
        self._num_told = 0  # settled ids that were sent to the draft
        self.epoch = 0
        self._run = _DraftedRun()
        self._num_repeated = 0  # tokens of the branch taken, with which the next run begins
        # What the last broken run had after its wrong token and is not compared yet, by index.
        self._broken_run: dict[int, int] = {}
        self._is_broken_run_new = False
        self._compared_end = 0  # all tokens before this index were compared, or never drafted
        self.is_finished = False
        self.pace = self._wanted_pace()  # at first, the pace of both Open messages
        self.stats = SpeculationStats()

    @property
    def owes_block(self) -> bool:
        """Whether the draft should send another block, as far as the gateway knows.

        A draft rightly sends nothing before its prefill is over, while it rests, when it is
        ``max_ahead`` tokens ahead, after an end token, and before the last token, which is the
        target's. (A block's ``is_exhausted`` does not suffice: it ends with the next commit, which
        may be on its way already.) Before the target's first token, nothing waits for the draft.
        """
        run, has_begun = self._run, self._is_drafting and bool(self.committed_ids)
        is_at_end = run.is_complete or max(self._num_told, run.end) >= self._max_tokens - 1
        num_ahead = 0 if run.is_broken else max(0, run.end - self._num_told)
        return has_begun and not is_at_end and num_ahead < self.pace.max_ahead

    def on_block(self, block: Block, now_ns: int) -> list[Action]:
        self.stats.count_block(block, num_new=self._count_new(block))
        if self.is_finished or not self.has_draft or block.epoch < self.epoch:
            self.stats.count_stale_block(block, is_finished=self.is_finished)
            return []
        end = self.stats.relayed_end_index = block.start_index + len(block.token_ids)
        self._is_drafting = True
        self._enter_epoch(block.epoch)
        run = self._run
        if not run.is_broken and block.token_ids:
            run.end = end
            run.is_complete = block.token_ids[-1] in self._end_token_ids
            for index, token_id in enumerate(block.token_ids, block.start_index):
                if index >= self._compared_end:
                    run.drafted[index] = token_id
            self._policy.observe_block(block, self._compare_run(), now_ns)
        return [ToTarget(block), *self._commit_to_draft(self._wanted_pace()), *self._update_pace()]

    def _count_new(self, block: Block) -> int:
        """Returns how many tokens of the block and its branches were not received before."""
        num_new = len(block.token_ids)
        if block.is_from_branch:
            num_new -= min(self._num_repeated, num_new)
            self._num_repeated = 0
        return num_new + self._run.add_branches(block)

    def on_verdict(self, verdict: Verdict, now_ns: int) -> list[Action]:
        num_rejections = max(verdict.epoch - self.epoch, 0)
        self.stats.count_verdict(
            verdict, num_rejections=num_rejections, is_drafting=self.pace.max_ahead > 0
        )
        self.committed_ids.extend(verdict.token_ids)
        self._compare_broken_run()
        outcomes = self._compare_run()
        if num_rejections:  # an answer may end before the target rejects a wrong token
            self.stats.num_branches_taken += self._run.is_branch_taken
        self.epoch += num_rejections
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
        self._run = _DraftedRun(self._run.epoch)
        self._num_told = num_committed
        self.pace = pace = self._wanted_pace()
        return [*self._commit_to_draft(pace), ToTarget(pace), ToDraft(pace)]

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
        if epoch > self._run.epoch:
            self._run = _DraftedRun(epoch)

    def _take_outcomes(self, drafted: dict[int, int]) -> list[tuple[int, bool]]:
        """Compares drafted with settled tokens, each once; returns the index of each, and whether
        it was right. At most the last was not, because those after a wrong token are left."""
        outcomes: list[tuple[int, bool]] = []
        for index in sorted(drafted):
            if index >= len(self.committed_ids) or (outcomes and not outcomes[-1][1]):
                break
            outcomes.append((index, drafted.pop(index) == self.committed_ids[index]))
        return outcomes

    def _compare_run(self) -> list[bool]:
        outcomes = self._take_outcomes(self._run.drafted)
        for index, is_right in outcomes[-1:]:
            self._compared_end = index + 1
            if not is_right:
                self._break_run(index)
        return [is_right for _, is_right in outcomes]

    def _break_run(self, index: int) -> None:
        self._broken_run = self._run.drafted
        self._is_broken_run_new = True
        branch, settled = self._run.branches.get(index, ()), tuple(self.committed_ids[index:])
        is_taken = branch[: len(settled)] == settled
        self._num_repeated = len(branch) - len(settled) if is_taken else 0
        self._run = _DraftedRun(self._run.epoch, is_broken=True, is_branch_taken=is_taken)

    def _compare_broken_run(self) -> None:
        """Compares what the last broken run had after its wrong token with the settled tokens, up
        to its next wrong token, and tells the policy."""
        outcomes = [is_right for _, is_right in self._take_outcomes(self._broken_run)]
        if outcomes:
            if not outcomes[-1]:
                self._broken_run = {}
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
        if _for_target(self.pace) != _for_target(before):
            actions.append(ToTarget(self.pace))
        if self.has_draft and _for_draft(self.pace) != _for_draft(before):
            actions.append(ToDraft(self.pace))
        return actions

    def _commit_to_draft(self, pace: Pace) -> list[Action]:
        num_settled = len(self.committed_ids)
        if not self.has_draft or pace.max_ahead == 0 or self._num_told == num_settled:
            return []
        commit = Commit(self.epoch, self._num_told, tuple(self.committed_ids[self._num_told :]))
        self._num_told = num_settled
        return [ToDraft(commit)]


def _for_target(pace: Pace) -> Pace:
    return Pace(pace.optimistic, pace.conservative, max_reused=pace.max_reused)


def _for_draft(pace: Pace) -> Pace:
    first = StepLimits(min_draft_tokens=pace.conservative.min_draft_tokens)
    return replace(pace, optimistic=StepLimits(), conservative=first, max_reused=0)


def _without_waits(pace: Pace) -> Pace:
    """Returns ``pace`` for a target that does not wait, as a draft's prefill may take any time."""
    # Without min_draft_tokens there is no wait, so wait_ns stays and no message is needed.
    optimistic, conservative = (
        replace(limits, wait_ns=0) if limits.min_draft_tokens else limits
        for limits in (pace.optimistic, pace.conservative)
    )
    return replace(pace, optimistic=optimistic, conservative=conservative)
