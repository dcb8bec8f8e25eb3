"""The gateway's side of one sequence: relays blocks and verdicts, and sets the pace of both."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from hippo.speculation.policies import Policy
from hippo.speculation.stats import SpeculationStats
from hippo.types import TARGET_ONLY, Block, Commit, Pace, StepLimits, Verdict


@dataclass(frozen=True, slots=True)
class SendBlock:
    """To the target."""

    block: Block


@dataclass(frozen=True, slots=True)
class SendCommit:
    """To the draft."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class SetTargetPace:
    """To the target."""

    pace: Pace


@dataclass(frozen=True, slots=True)
class SetDraftPace:
    """To the draft, if one is attached."""

    pace: Pace


Action = SendBlock | SendCommit | SetTargetPace | SetDraftPace


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
        self._has_draft = has_draft
        self._is_drafting = False  # its prefill is over
        self._max_tokens = max_tokens
        self._end_token_ids = frozenset(end_token_ids)
        # Of what the draft has said: the index after its last token, that token's run, and whether
        # it was an end token.
        self._said_end = 0
        self._said_epoch = 0
        self._has_said_end_token = False
        self._committed: list[int] = []
        self._num_told = 0  # settled ids that the draft knows of
        self._epoch = 0
        self._is_finished = False
        self._was_conservative = False
        self._pace = self._wanted_pace()
        self.stats = SpeculationStats()

    @property
    def pace(self) -> Pace:
        """The pace last set; at first, the one for both Opens."""
        return self._pace

    @property
    def committed_ids(self) -> Sequence[int]:
        """The settled ids so far; with ``epoch``, what a draft that joins is opened with."""
        return self._committed

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def has_draft(self) -> bool:
        return self._has_draft

    @property
    def is_finished(self) -> bool:
        return self._is_finished

    @property
    def owes_block(self) -> bool:
        """Whether the draft has all that it needs to say more, as far as is known here.

        The rule of ``Drafter.is_exhausted``: a draft is silent in good order before its prefill is
        over, while it rests, as far ahead as it may go, behind an end token, and where the target
        gives the last token itself. Before the target's first token nobody waits for it.
        """
        if not self._is_drafting or not self._committed:
            return False
        end = self._num_told
        if self._said_epoch >= self._epoch and self._said_end > end:
            if self._has_said_end_token:
                return False
            end = self._said_end
        return end - self._num_told < self._pace.max_ahead and end < self._max_tokens - 1

    def on_block(self, block: Block, now_ns: int) -> list[Action]:
        """A block came from the draft."""
        stats = self.stats
        stats.num_blocks += 1
        stats.num_drafted_tokens += len(block.token_ids)
        stats.draft_wait_ns += block.wait_ns
        stats.draft_step_ns = block.step_ns or stats.draft_step_ns
        stats.drafting_ns += len(block.token_ids) * block.step_ns
        if self._is_finished or not self._has_draft or block.epoch < self._epoch:
            stats.num_stale_blocks += 1
            stats.num_dropped_tokens += len(block.token_ids)
            if not self._is_finished:
                stats.num_stale_tokens += len(block.token_ids)
            return []
        self._said_end = stats.relayed_end_index = block.start_index + len(block.token_ids)
        self._said_epoch = block.epoch
        self._has_said_end_token = bool(
            block.token_ids and block.token_ids[-1] in self._end_token_ids
        )
        self._is_drafting = True
        self._policy.observe_block(block, now_ns)
        return [SendBlock(block), *self._tell_draft(self._wanted_pace()), *self._update_pace()]

    def on_verdict(self, verdict: Verdict, now_ns: int) -> list[Action]:
        """A verdict came from the target."""
        self._count(verdict)
        self._committed.extend(verdict.token_ids)
        self._epoch = max(self._epoch, verdict.epoch)
        if verdict.finish_reason is not None:
            self._is_finished = True
            return []
        self._policy.observe_verdict(verdict, now_ns)
        return [*self._tell_draft(self._wanted_pace()), *self._update_pace()]

    def on_draft_attached(self, num_committed: int = 0) -> list[Action]:
        """A draft's stream was opened with the first ``num_committed`` settled ids."""
        if self._is_finished:
            return []
        self._has_draft, self._is_drafting = True, False
        self._said_end = 0
        self._num_told = num_committed
        pace = self._wanted_pace()
        actions = self._tell_draft(pace)
        self._pace = pace
        return [*actions, SetTargetPace(pace), SetDraftPace(pace)]

    def on_draft_ready(self) -> list[Action]:
        """The draft's prefill is over: from here on the target may wait for it."""
        if self._is_finished or not self._has_draft:
            return []
        self._is_drafting = True
        return self._update_pace()

    def on_draft_lost(self) -> list[Action]:
        """The draft's stream is gone; the target goes alone."""
        if not self._has_draft:
            return []
        self._has_draft = self._is_drafting = False
        self.stats.num_draft_losses += 1
        return [] if self._is_finished else self._update_pace()

    def _wanted_pace(self) -> Pace:
        if self._is_drafting:
            return self._policy.pace
        return _without_waits(self._policy.pace) if self._has_draft else TARGET_ONLY

    def _update_pace(self) -> list[Action]:
        """Tells each side what has changed for it: a message costs both of its ends."""
        before, self._pace = self._pace, self._wanted_pace()
        actions: list[Action] = []
        if self._pace.for_target != before.for_target:
            actions.append(SetTargetPace(self._pace))
        if self._has_draft and self._pace.for_draft != before.for_draft:
            actions.append(SetDraftPace(self._pace))
        return actions

    def _tell_draft(self, pace: Pace) -> list[Action]:
        """Commits the draft has not heard of; held back while it is not to draft anyway."""
        num_settled = len(self._committed)
        if not self._has_draft or pace.max_ahead == 0 or self._num_told == num_settled:
            return []
        commit = Commit(self._epoch, self._num_told, tuple(self._committed[self._num_told :]))
        self._num_told = num_settled
        return [SendCommit(commit)]

    def _count(self, verdict: Verdict) -> None:
        stats, timing = self.stats, verdict.timing
        num_tokens = len(verdict.token_ids)
        stats.num_output_tokens += num_tokens
        self._count_dropped(verdict)
        if verdict.epoch > self._epoch:
            stats.num_rejections += verdict.epoch - self._epoch
            # The verdict's last token corrects the run; the next one begins after it.
            stats.run_lengths.append(stats.open_run_length + num_tokens)
            stats.open_run_length = 0
        elif self._pace.max_ahead > 0:
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
        num_rejections = max(verdict.epoch - self._epoch, 0)
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
