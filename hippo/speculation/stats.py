"""Counts, times and rates of one sequence's speculation."""

from dataclasses import dataclass, field

from hippo.types import Block, Verdict


@dataclass(slots=True)
class SpeculationStats:
    """Counts and times of one sequence, as seen by the gateway.

    docs/algorithms.md relates ``mean_tokens_per_forward`` and ``mean_run_length`` to the "mean
    accepted tokens" that others report.
    """

    num_output_tokens: int = 0
    num_forwards: int = 0  # the target's, without its prefill
    num_draft_tokens: int = 0  # verified draft tokens, over all forwards
    num_accepted_tokens: int = 0  # verified draft tokens that were accepted
    num_reused_tokens: int = 0  # tokens of broken runs that were verified, over all forwards
    num_accepted_reused: int = 0
    num_drafted_tokens: int = 0  # received from the draft, verified or not
    num_dropped_tokens: int = 0  # received, and rejected or never verified: the next three
    num_rejected_tokens: int = 0  # tokens that differed from the target's
    num_behind_rejection_tokens: int = 0  # tokens after a rejected token
    num_stale_tokens: int = 0  # tokens that arrived after the end of their run
    relayed_end_index: int = 0  # after the last draft token that was sent to the target
    num_blocks: int = 0
    num_stale_blocks: int = 0  # dropped by the gateway
    num_rejections: int = 0
    num_branches_taken: int = 0  # rejections after which the settled token began a branch
    num_mode_switches: int = 0
    num_draft_losses: int = 0
    verified_per_position: list[int] = field(default_factory=list)  # by position in the forward
    accepted_per_position: list[int] = field(default_factory=list)
    # Tokens settled from one rejection to the next, without those settled while the draft rested.
    run_lengths: list[int] = field(default_factory=list)
    open_run_length: int = 0
    prefill_ns: int = 0
    forward_ns: int = 0
    optimistic_ns: int = 0  # forwards with draft tokens and the waits before them
    conservative_ns: int = 0
    target_only_ns: int = 0  # forwards of one row and the waits before them
    target_wait_ns: int = 0  # the target's device waited for the draft
    draft_wait_ns: int = 0
    draft_step_ns: int = 0  # time per draft token, the draft's latest running mean
    drafting_ns: int = 0  # draft time of all received tokens
    num_one_row_forwards: int = 0  # the target's
    one_row_ns: int = 0  # time of the one-row forwards
    was_conservative: bool = False  # the last forward

    def count_block(self, block: Block, *, num_new: int) -> None:
        """Counts a block from the draft, of whose tokens ``num_new`` were not received before."""
        self.num_blocks += 1
        self.num_drafted_tokens += num_new
        self.draft_wait_ns += block.wait_ns
        self.draft_step_ns = block.step_ns or self.draft_step_ns
        self.drafting_ns += num_new * block.step_ns

    def count_stale_block(self, block: Block, *, is_finished: bool) -> None:
        """Counts a block that the gateway dropped, after the answer's end if it ``is_finished``."""
        self.num_stale_blocks += 1
        self.num_dropped_tokens += len(block.token_ids)
        if not is_finished:
            self.num_stale_tokens += len(block.token_ids)

    def count_verdict(self, verdict: Verdict, *, num_rejections: int, is_drafting: bool) -> None:
        """Counts a verdict with ``num_rejections``; ``is_drafting``: the draft does not rest."""
        timing, num_tokens = verdict.timing, len(verdict.token_ids)
        self.num_output_tokens += num_tokens
        num_dropped = verdict.num_dropped_tokens
        num_rejected = min(num_rejections, num_dropped)
        self.num_dropped_tokens += num_dropped
        self.num_rejected_tokens += num_rejected
        if not num_rejections and verdict.finish_reason is None:  # the rest has no count of its own
            self.num_stale_tokens += num_dropped
        if num_rejections:
            self.num_behind_rejection_tokens += num_dropped - num_rejected
            self.num_rejections += num_rejections
            # The verdict's last token corrects the run; the next run begins after it.
            self.run_lengths.append(self.open_run_length + num_tokens)
            self.open_run_length = 0
        elif is_drafting:
            self.open_run_length += num_tokens
        self.target_wait_ns += timing.wait_ns
        if verdict.start_index == 0:
            self.prefill_ns += timing.forward_ns
        else:
            self._count_forward(verdict)

    def _count_forward(self, verdict: Verdict) -> None:
        num_drafts, num_reused = verdict.num_draft_tokens, verdict.num_reused_tokens
        forward_ns = verdict.timing.forward_ns
        elapsed_ns = forward_ns + verdict.timing.wait_ns
        self.num_forwards += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += verdict.num_accepted_tokens
        self.num_reused_tokens += num_reused
        self.num_accepted_reused += verdict.num_accepted_reused
        # Reused tokens were counted as dropped with their run.
        num_used = min(verdict.num_accepted_reused, self.num_behind_rejection_tokens)
        self.num_behind_rejection_tokens -= num_used
        self.num_dropped_tokens -= num_used
        self.forward_ns += forward_ns
        num_more = max(num_drafts - len(self.verified_per_position), 0)
        self.verified_per_position += [0] * num_more
        self.accepted_per_position += [0] * num_more
        for position in range(num_drafts):
            self.verified_per_position[position] += 1
            self.accepted_per_position[position] += position < verdict.num_accepted_tokens
        self.num_mode_switches += verdict.is_conservative != self.was_conservative
        self.was_conservative = verdict.is_conservative
        if num_drafts + num_reused == 0:
            self.num_one_row_forwards += 1
            self.one_row_ns += forward_ns
            self.target_only_ns += elapsed_ns
        elif verdict.is_conservative:
            self.conservative_ns += elapsed_ns
        else:
            self.optimistic_ns += elapsed_ns

    @property
    def num_drafts(self) -> int:
        """Number of forwards that verified draft tokens; reused tokens do not count."""
        return self.verified_per_position[0] if self.verified_per_position else 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over verified draft tokens; 0 when none was verified."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_tokens_per_forward(self) -> float:
        """1 + accepted / forwards, with accepted reused tokens; 0 when there was no forward."""
        num_accepted = self.num_accepted_tokens + self.num_accepted_reused
        return 1 + num_accepted / self.num_forwards if self.num_forwards else 0.0

    @property
    def mean_run_length(self) -> float:
        """Mean number of tokens settled between two rejections, including the corrected token."""
        lengths = self.all_run_lengths
        return sum(lengths) / len(lengths) if lengths else 0.0

    @property
    def all_run_lengths(self) -> list[int]:
        """Lengths of the runs that a rejection ended, and of the open run."""
        return [*self.run_lengths, *([self.open_run_length] if self.open_run_length else [])]

    @property
    def num_ahead_tokens(self) -> int:
        """Number of draft tokens sent to the target for indices that are not settled."""
        return max(0, self.relayed_end_index - self.num_output_tokens)

    @property
    def acceptance_per_position(self) -> list[float]:
        pairs = zip(self.accepted_per_position, self.verified_per_position, strict=True)
        return [accepted / verified for accepted, verified in pairs]
