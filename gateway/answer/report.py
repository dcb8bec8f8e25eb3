"""The record of one completion, and the ``hippo`` and ``metrics`` objects computed from it."""

import itertools
import time
from dataclasses import dataclass, field
from typing import Any

from gateway.answer.event_schemas import Service
from gateway.answer.events import EventLog
from gateway.answer.figures import (
    AnswerMetrics,
    CachedTokens,
    Figures,
    PruningFigures,
    SpeculativeDecoding,
    Timings,
    ms,
)
from gateway.common.baseline import Baseline, OneRowTimes, StepsByContext, context_range
from gateway.common.errors import without_addresses
from hippo.metrics.gateway import DraftLoss
from hippo.speculation.stats import SpeculationStats
from hippo.types import (
    Block,
    FinishReason,
    OpenRequest,
    PromptInfo,
    Pruning,
    Selection,
    Timing,
    Verdict,
)


def seconds_left(limit_s: float | None, received_ns: int) -> float | None:
    """Returns the time left until ``limit_s`` after a request's arrival, at least 0; None if there
    is no limit (0 or None)."""
    if not limit_s:
        return None
    return max(limit_s - (time.monotonic_ns() - received_ns) / 1e9, 0.0)


@dataclass(slots=True)
class Timeline:
    """All verdicts and blocks of one completion, with their times of arrival at the gateway."""

    verdicts: list[tuple[int, Verdict]] = field(default_factory=list)  # (ns, verdict)
    blocks: list[tuple[int, Block]] = field(default_factory=list)

    def as_dict(self, start_ns: int) -> dict[str, list[dict[str, Any]]]:
        """Returns a JSON object; times are in milliseconds, ``at`` is counted from ``start_ns``."""
        return {
            "verdicts": [
                {
                    "at": ms(now_ns - start_ns),
                    "tokens": len(verdict.token_ids),
                    "rows": verdict.timing.num_rows,
                    "context": verdict.timing.context_length,
                    "forward": ms(verdict.timing.forward_ns),
                    "wait": ms(verdict.timing.wait_ns),
                    "between": ms(verdict.timing.queue_ns),
                    "is_rejection": verdict.is_rejection,
                }
                for now_ns, verdict in self.verdicts
            ],
            "blocks": [
                {
                    "at": ms(now_ns - start_ns),
                    "epoch": block.epoch,
                    "start": block.start_index,
                    "tokens": len(block.token_ids),
                    "token_ids": list(block.token_ids),
                    "step": ms(block.step_ns),
                    "wait": ms(block.wait_ns),
                }
                for now_ns, block in self.blocks
            ],
        }


@dataclass(slots=True)
class AnswerRecord:
    """Facts of one completion, gathered while it runs. Times are of ``time.monotonic_ns``."""

    policy: str
    received_ns: int
    opened_ns: int = 0  # the media were read, the streams are being opened
    first_block_ns: int = 0
    first_verdict_ns: int = 0
    last_verdict_ns: int = 0
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    target_prompt: PromptInfo | None = None
    draft_prompt: PromptInfo | None = None
    target_prefill: Timing | None = None
    draft_prefill: Timing | None = None
    selection: Selection | None = None
    num_completion_tokens: int = 0
    num_thought_tokens: int = 0  # of them
    num_draft_streams: int = 0
    num_draft_recoveries: int = 0  # draft streams that joined a running answer
    draft_losses: list[DraftLoss] = field(default_factory=list)
    draft_problem: str | None = None
    finish_reason: FinishReason | None = None
    has_failed: bool = False
    is_calibration: bool = False
    intervals_ns: list[int] = field(default_factory=list)  # from one verdict to the next
    alone_steps: StepsByContext = field(default_factory=dict)  # sums of target-only steps
    was_alone: bool = False  # ``is_alone`` of the previous verdict
    timeline: Timeline | None = None
    events: EventLog | None = None

    def add_prompt(self, service: Service, info: PromptInfo, now_ns: int) -> None:
        if service == "target":
            self.target_prompt = info
        else:
            self.draft_prompt = info
        if self.events is not None:
            self.events.add_prompt(service, info, now_ns)

    def add_selection(self, selection: Selection, pruning: Pruning, now_ns: int) -> None:
        self.selection = selection
        if self.events is not None:
            self.events.add_selection(selection, pruning, now_ns)

    def add_draft_prefill(self, timing: Timing, now_ns: int) -> None:
        self.draft_prefill = timing
        if self.events is not None:
            self.events.add_draft_prefill(timing, now_ns)

    def add_draft_loss(self, problem: str, now_ns: int) -> None:
        self.draft_problem = problem
        if self.events is not None:
            self.events.add_draft_loss(problem, now_ns)

    def add_verdict(self, verdict: Verdict, now_ns: int, *, is_alone: bool = False) -> None:
        """Records a verdict, whose tokens ``num_completion_tokens`` counts already; ``is_alone``:
        there was no draft, or the policy let the draft rest."""
        if not self.first_verdict_ns:
            self.first_verdict_ns = now_ns
            self.target_prefill = verdict.timing
        else:
            duration_ns = now_ns - self.last_verdict_ns
            self.intervals_ns.append(duration_ns)
            has_verified = verdict.num_draft_tokens or verdict.num_reused_tokens
            if is_alone and self.was_alone and not has_verified:
                context_length = verdict.timing.context_length
                sums = self.alone_steps.setdefault(context_range(context_length), OneRowTimes())
                sums.add_step(duration_ns, context_length)
        self.was_alone = is_alone
        self.last_verdict_ns = now_ns
        if self.timeline is not None:
            self.timeline.verdicts.append((now_ns, verdict))
        if self.events is not None:
            self.events.add_verdict(verdict, now_ns, num_tokens=self.num_completion_tokens)

    def add_block(self, block: Block, now_ns: int) -> None:
        self.first_block_ns = self.first_block_ns or now_ns
        if self.timeline is not None:
            self.timeline.blocks.append((now_ns, block))
        if self.events is not None:
            self.events.add_block(block, now_ns)

    @property
    def outcome(self) -> str | None:
        """``stop``, ``length`` or ``error``; None for an answer that the client left."""
        if self.has_failed:
            return "error"
        return self.finish_reason.value if self.finish_reason is not None else None

    @property
    def served_s(self) -> float:
        """Seconds from the opening of the streams to the last verdict, without the wait for a slot;
        the target must have read the prompt."""
        assert self.target_prompt is not None
        return (self.last_verdict_ns - self.opened_ns - self.target_prompt.queue_ns) / 1e9

    @property
    def num_prompt_tokens(self) -> int:
        """0 before the target has read the prompt."""
        return self.target_prompt.num_prompt_tokens if self.target_prompt is not None else 0

    @property
    def num_visual_tokens(self) -> int:
        """Number of the prompt's visual tokens; 0 before the target has read the prompt."""
        return self.target_prompt.num_visual_tokens if self.target_prompt is not None else 0

    @property
    def num_cached_tokens(self) -> int:
        """Number of prompt tokens whose keys and values the target had cached."""
        return self.target_prefill.context_length if self.target_prefill is not None else 0

    @property
    def decode_ns(self) -> int:
        """Time from the first token to the last."""
        return self.last_verdict_ns - self.first_verdict_ns

    @property
    def mean_context_length(self) -> int:
        return self.num_prompt_tokens + self.num_completion_tokens // 2

    def baseline_ns(self, baseline: Baseline) -> float | None:
        """Returns the estimated time of target-only decoding; None if ``baseline`` has no
        measurements or all tokens of the answer came at once."""
        if not baseline.is_known or self.num_completion_tokens < 2 or self.decode_ns <= 0:
            return None
        return (self.num_completion_tokens - 1) * baseline.step_ns(self.mean_context_length)

    @property
    def transport_ns(self) -> int:
        """Time of decoding in which the target's device neither worked nor waited for the draft."""
        busy_ns = self.stats.forward_ns + self.stats.target_wait_ns
        if self.target_prefill is not None:
            busy_ns -= self.target_prefill.wait_ns  # the prefill's wait is not part of decoding
        return self.decode_ns - busy_ns


def figures(record: AnswerRecord, request: OpenRequest, baseline: Baseline) -> dict[str, Any]:
    """Returns the ``hippo`` object of an answer."""
    stats, selection = record.stats, record.selection
    draft_prefill = record.draft_prefill
    baseline_ns = record.baseline_ns(baseline)
    made = Figures(
        policy=record.policy,
        is_calibration=record.is_calibration,
        estimated_speedup=round(baseline_ns / record.decode_ns, 3) if baseline_ns else None,
        seed=request.sampling.seed,
        draft_used=stats.num_draft_tokens + stats.num_reused_tokens > 0,
        draft_problem=record.draft_problem and without_addresses(record.draft_problem),
        num_draft_streams=record.num_draft_streams,
        pruning=PruningFigures(
            strategy=request.pruning.strategy.value,
            ratio=request.pruning.ratio,
            num_visual_tokens=selection.num_visual_tokens if selection else None,
            num_kept_tokens=len(selection.kept_indices) if selection else None,
        ),
        num_cached_tokens=CachedTokens(
            target=record.num_cached_tokens,
            draft=draft_prefill.context_length if draft_prefill else None,
        ),
        timings_ms=_timings(record),
        **{name: getattr(stats, name) for name in Figures.model_fields if hasattr(stats, name)},
    )
    if record.timeline is not None:
        made.timeline_ms = record.timeline.as_dict(record.first_verdict_ns)
    return made.model_dump(exclude_unset=True)


def client_metrics(record: AnswerRecord) -> dict[str, Any]:
    """Returns the ``metrics`` object, with the names of vLLM."""
    stats = record.stats
    num_later = record.num_completion_tokens - 1
    decode_s = record.decode_ns / 1e9
    is_decoded = num_later > 0 and decode_s > 0
    num_steps = stats.num_drafts
    at_least = [num_steps, *stats.accepted_per_position, 0]  # steps that accepted k or more
    speculative = SpeculativeDecoding(
        mean_acceptance_length=1 + stats.num_accepted_tokens / max(num_steps, 1),
        draft_acceptance_rate=stats.acceptance_rate,
        acceptance_histogram=[more - fewer for more, fewer in itertools.pairwise(at_least)],
        num_spec_steps=num_steps,
        num_accepted_draft_tokens=stats.num_accepted_tokens,
        num_draft_tokens=stats.num_draft_tokens,
        num_spec_tokens=len(stats.verified_per_position),
    )
    return AnswerMetrics(
        time_to_first_token_ms=ms(record.first_verdict_ns - record.received_ns),
        generation_time_ms=ms(record.decode_ns),
        queue_time_ms=ms(record.target_prompt.queue_ns) if record.target_prompt else None,
        mean_itl_ms=ms(record.decode_ns / num_later) if is_decoded else None,
        tokens_per_second=round(num_later / decode_s, 2) if is_decoded else None,
        speculative_decoding=speculative if num_steps else None,
    ).model_dump()


def _timings(record: AnswerRecord) -> Timings:
    stats = record.stats
    target, draft, selection = record.target_prompt, record.draft_prompt, record.selection
    target_prefill, draft_prefill = record.target_prefill, record.draft_prefill
    num_forwards, num_alone = stats.num_forwards, stats.num_one_row_forwards
    first_block_ns = record.first_block_ns
    return Timings(
        media=ms(record.opened_ns - record.received_ns),
        queue=ms(target.queue_ns) if target else None,
        target_preprocess=ms(target.preprocess_ns) if target else None,
        draft_preprocess=ms(draft.preprocess_ns) if draft else None,
        selection=ms(selection.score_ns) if selection else None,
        target_prefill=ms(target_prefill.forward_ns) if target_prefill else None,
        draft_prefill=ms(draft_prefill.forward_ns) if draft_prefill else None,
        time_to_first_token=ms(record.first_verdict_ns - record.received_ns),
        first_block_after_first_token=(
            ms(first_block_ns - record.first_verdict_ns) if first_block_ns else None
        ),
        decode=ms(record.decode_ns),
        total=ms(record.last_verdict_ns - record.received_ns),
        target_forward=ms(stats.forward_ns),
        target_step=ms(stats.one_row_ns / num_alone) if num_alone else None,
        draft_step=ms(stats.draft_step_ns) if stats.draft_step_ns else None,
        transport_per_round=ms(record.transport_ns / num_forwards) if num_forwards else None,
        target_wait=ms(stats.target_wait_ns),
        draft_wait=ms(stats.draft_wait_ns),
        optimistic=ms(stats.optimistic_ns),
        conservative=ms(stats.conservative_ns),
        target_only=ms(stats.target_only_ns),
    )
