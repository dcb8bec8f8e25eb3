"""What speculation did for one sequence."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class SpeculationStats:
    """Counts and times of one sequence, as the gateway saw them.

    Two readings of "accepted tokens" are kept apart: ``mean_tokens_per_forward`` (what public
    servers report) and ``mean_run_length`` (what the PEARL and HIPPO code reports).
    """

    num_output_tokens: int = 0
    num_forwards: int = 0  # of the target, its prefill not counted
    num_draft_tokens: int = 0  # rows that held a draft token, over all forwards
    num_accepted_tokens: int = 0  # of those
    num_drafted_tokens: int = 0  # received from the draft, verified or not
    num_dropped_tokens: int = 0  # received, and rejected or never verified; of these ...
    num_rejected_tokens: int = 0  # ... the ones that differed from the target's
    num_behind_rejection_tokens: int = 0  # ... those that followed them
    num_stale_tokens: int = 0  # ... those of a run that had ended when they came
    relayed_end_index: int = 0  # after the last draft token that was sent to the target
    num_blocks: int = 0
    num_stale_blocks: int = 0  # dropped here, before the target
    num_rejections: int = 0
    num_mode_switches: int = 0
    num_draft_losses: int = 0
    verified_per_position: list[int] = field(default_factory=list)  # position in the forward
    accepted_per_position: list[int] = field(default_factory=list)
    # Tokens settled from one rejection to the next, while the draft had something to do.
    run_lengths: list[int] = field(default_factory=list)
    open_run_length: int = 0
    prefill_ns: int = 0
    forward_ns: int = 0
    optimistic_ns: int = 0  # forwards with draft tokens and the waits before them
    conservative_ns: int = 0
    target_only_ns: int = 0  # forwards without
    target_wait_ns: int = 0  # the target's device waited for the draft
    draft_wait_ns: int = 0
    draft_step_ns: int = 0  # one drafting step, the draft's latest running mean
    drafting_ns: int = 0  # steps of the tokens that came
    num_one_row_forwards: int = 0  # of the target
    one_row_ns: int = 0  # in these

    @property
    def acceptance_rate(self) -> float:
        """Accepted over verified draft tokens; 0 when none was verified."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_tokens_per_forward(self) -> float:
        """1 + accepted / forwards; 0 when there was no forward."""
        return 1 + self.num_accepted_tokens / self.num_forwards if self.num_forwards else 0.0

    @property
    def mean_run_length(self) -> float:
        """Tokens settled between two rejections, the corrected one included."""
        lengths = self.all_run_lengths
        return sum(lengths) / len(lengths) if lengths else 0.0

    @property
    def all_run_lengths(self) -> list[int]:
        """Those of the runs that a rejection ended, and of the one that is open."""
        return [*self.run_lengths, *([self.open_run_length] if self.open_run_length else [])]

    @property
    def num_ahead_tokens(self) -> int:
        """Draft tokens sent to the target for places that it has not settled."""
        return max(0, self.relayed_end_index - self.num_output_tokens)

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share accepted of the k-th draft token of a forward."""
        pairs = zip(self.accepted_per_position, self.verified_per_position, strict=True)
        return [accepted / verified for accepted, verified in pairs]
