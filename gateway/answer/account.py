"""Adds a completion to the metrics when it has ended, which takes about 50 us, and describes the
answer in its span: OpenTelemetry's ``gen_ai`` attributes, and hippo's own."""

import time
from typing import Any

from gateway.answer.choices import Choices
from gateway.answer.report import AnswerRecord
from gateway.common.baseline import Baseline
from gateway.common.metrics import GatewayMetrics, ModelMetrics
from gateway.pairs.targets import Target
from hippo.base.tracing import current_span
from hippo.metrics import gateway as own
from hippo.metrics import vllm
from hippo.metrics.gateway import Waste
from hippo.types import OpenRequest

_MAX_INT = 2**63 - 1  # the largest attribute of a span


def count_completion(
    record: AnswerRecord,
    request: OpenRequest,
    *,
    metrics: GatewayMetrics,
    model: ModelMetrics,
    target: Target,
) -> None:
    """Adds one completion to the metrics, and what it tells of its ``target`` to the target's
    baseline and mean time of an answer."""
    baseline = target.baseline
    _count_as_vllm_does(record, model)
    metrics[own.COMPLETIONS].labels(record.policy, record.outcome or "cancelled").inc()
    metrics[own.CALIBRATIONS].inc(record.is_calibration)
    # Before the baseline learns from this answer, so that metrics and answer have one speedup.
    _count_speedup(record, metrics, baseline)
    baseline.learn_steps(record.alone_steps, time.monotonic_ns())
    num_steps = sum(sums.num_steps for sums in record.alone_steps.values())
    metrics[own.BASELINE_STEPS].labels(target.address).inc(num_steps)
    if record.finish_reason is not None:
        target.note_answer(record.served_s)
    if record.policy != "off" and record.num_completion_tokens > 1:
        baseline.note_context_length(record.mean_context_length)
    _count_times(record, metrics)
    _count_draft(record, metrics)
    if record.selection is not None and record.draft_prefill is not None:
        num_kept = len(record.selection.kept_indices)
        strategy = request.pruning.strategy.value
        num_pruned = record.selection.num_visual_tokens - num_kept
        metrics[own.VISUAL_TOKENS].labels(strategy, "kept").inc(num_kept)
        metrics[own.VISUAL_TOKENS].labels(strategy, "pruned").inc(num_pruned)


def _count_as_vllm_does(record: AnswerRecord, model: ModelMetrics) -> None:
    stats = record.stats
    model.ended[record.outcome or "abort"].inc()
    model[vllm.NUM_PROMPT_TOKENS].inc(record.num_prompt_tokens)
    model[vllm.NUM_GENERATION_TOKENS].inc(record.num_completion_tokens)
    model[vllm.NUM_DRAFTS].inc(stats.num_drafts)
    model[vllm.NUM_DRAFT_TOKENS].inc(stats.num_draft_tokens)
    model[vllm.NUM_ACCEPTED_TOKENS].inc(stats.num_accepted_tokens)
    pairs = zip(model.accepted_per_position, stats.accepted_per_position, strict=False)
    for accepted, num_accepted in pairs:
        accepted.inc(num_accepted)
    if record.target_prompt is not None:
        model[vllm.REQUEST_QUEUE_TIME].observe(record.target_prompt.queue_ns / 1e9)
        model[vllm.REQUEST_PROMPT_TOKENS].observe(record.num_prompt_tokens)
    if record.first_verdict_ns:
        first_token_s = (record.first_verdict_ns - record.received_ns) / 1e9
        model[vllm.TIME_TO_FIRST_TOKEN].observe(first_token_s, _exemplar())
        model[vllm.REQUEST_GENERATION_TOKENS].observe(record.num_completion_tokens)
        model[vllm.REQUEST_DECODE_TIME].observe(record.decode_ns / 1e9)
    if record.target_prefill is not None:
        model[vllm.PREFIX_CACHE_QUERIES].inc(record.num_prompt_tokens)
        model[vllm.PREFIX_CACHE_HITS].inc(record.num_cached_tokens)
        model[vllm.REQUEST_PREFILL_TIME].observe(record.target_prefill.forward_ns / 1e9)
    for interval_ns in record.intervals_ns:
        model[vllm.INTER_TOKEN_LATENCY].observe(interval_ns / 1e9)
    if record.num_completion_tokens > 1:
        model[vllm.REQUEST_TIME_PER_OUTPUT_TOKEN].observe(
            record.decode_ns / 1e9 / (record.num_completion_tokens - 1), _exemplar()
        )
    if record.finish_reason is not None:
        latency_s = (record.last_verdict_ns - record.received_ns) / 1e9
        model[vllm.E2E_REQUEST_LATENCY].observe(latency_s, _exemplar())


def _exemplar() -> dict[str, str] | None:
    """Returns the labels that link an observation to the request's trace, if there is one."""
    trace_id = current_span().trace_id
    return {"trace_id": trace_id} if trace_id else None


def _count_speedup(record: AnswerRecord, metrics: GatewayMetrics, baseline: Baseline) -> None:
    baseline_ns = record.baseline_ns(baseline)
    if baseline_ns is None:
        return
    metrics[own.DECODE_TIME].labels(record.policy).inc(record.decode_ns / 1e9)
    metrics[own.DECODE_BASELINE].labels(record.policy).inc(baseline_ns / 1e9)
    first_token_ns = record.first_verdict_ns - record.received_ns
    metrics[own.FIRST_TOKEN_TIME].labels(record.policy).inc(first_token_ns / 1e9)
    if record.policy != "off":
        metrics[own.REQUEST_SPEEDUP].observe(baseline_ns / record.decode_ns, _exemplar())


def _count_times(record: AnswerRecord, metrics: GatewayMetrics) -> None:
    stats = record.stats
    target_prefill, draft_prefill = record.target_prefill, record.draft_prefill
    for mode in ("optimistic", "conservative", "target_only"):
        metrics[own.MODE_TIME].labels(mode).inc(getattr(stats, f"{mode}_ns") / 1e9)
    metrics[own.MODE_SWITCHES].inc(stats.num_mode_switches)
    metrics[own.BUSY_TIME].labels("target").inc((stats.prefill_ns + stats.forward_ns) / 1e9)
    waited_ns = stats.target_wait_ns - (target_prefill.wait_ns if target_prefill else 0)
    metrics[own.WAIT_TIME].labels("target").inc(waited_ns / 1e9)
    prefill_ns = draft_prefill.forward_ns if draft_prefill else 0
    metrics[own.BUSY_TIME].labels("draft").inc((prefill_ns + stats.drafting_ns) / 1e9)
    metrics[own.WAIT_TIME].labels("draft").inc(stats.draft_wait_ns / 1e9)
    metrics[own.TARGET_FORWARDS].inc(stats.num_forwards)
    if stats.num_forwards:
        seconds = max(record.transport_ns, 0) / stats.num_forwards / 1e9
        metrics[own.ROUND_TRANSPORT].observe(seconds)


def _count_draft(record: AnswerRecord, metrics: GatewayMetrics) -> None:
    stats = record.stats
    metrics[own.BLOCKS].inc(stats.num_blocks)
    metrics[own.STALE_BLOCKS].inc(stats.num_stale_blocks)
    metrics[own.DRAFTED_TOKENS].inc(stats.num_drafted_tokens)
    for cause, num_tokens in wasted_tokens(record).items():
        metrics[own.WASTED_TOKENS].labels(cause.value).inc(num_tokens)
    num_rejected = stats.num_reused_tokens - stats.num_accepted_reused
    metrics[own.REUSED_TOKENS].labels("accepted").inc(stats.num_accepted_reused)
    metrics[own.REUSED_TOKENS].labels("rejected").inc(num_rejected)
    if record.policy != "off":
        for length in stats.all_run_lengths:
            metrics[own.RUN_LENGTH].observe(length)
    if record.first_block_ns and record.first_verdict_ns and not record.num_draft_recoveries:
        delay_ns = record.first_block_ns - record.first_verdict_ns
        metrics[own.FIRST_BLOCK_DELAY].observe(delay_ns / 1e9)
    for loss in record.draft_losses:
        metrics[own.DRAFT_LOSSES].labels(loss.value).inc()
    metrics[own.DRAFT_RECOVERIES].inc(record.num_draft_recoveries)


def wasted_tokens(record: AnswerRecord) -> dict[Waste, int]:
    """Returns the number of draft tokens that were received and not accepted, by cause."""
    stats = record.stats
    wasted = {
        Waste.REJECTED: stats.num_rejected_tokens,
        Waste.BEHIND_REJECTION: stats.num_behind_rejection_tokens,
        Waste.STALE: stats.num_stale_tokens,
    }
    num_unverified = stats.num_dropped_tokens - sum(wasted.values())
    # Verdicts do not report draft tokens that the verifier still holds, or receives, after the last
    # verdict; these lie ahead of the answer. The target settled the rest without using them.
    num_used = stats.num_accepted_tokens + stats.num_accepted_reused
    num_rest = stats.num_drafted_tokens - num_used - stats.num_dropped_tokens
    num_held = min(max(num_rest, 0), stats.num_ahead_tokens)
    wasted[Waste.SETTLED_FIRST] = max(num_rest, 0) - num_held
    wasted[Waste.UNVERIFIED] = num_unverified + num_held
    return wasted


def describe_answer(head: dict[str, Any], request: OpenRequest, choices: Choices) -> None:
    """Describes an answer, finished or not, in the request's span; ``head`` has its id and model.

    Counts and rates are over all choices of the request.
    """
    span = current_span()
    if not span.is_recording:
        return
    records, sampling, usage = choices.records, request.sampling, choices.usage

    def total(name: str) -> int:
        return sum(getattr(record.stats, name) for record in records)

    num_forwards, num_draft_tokens = total("num_forwards"), total("num_draft_tokens")
    num_accepted = total("num_accepted_tokens")
    first = min((each.first_verdict_ns for each in records if each.first_verdict_ns), default=None)
    span.set(
        {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "hippo",
            "gen_ai.request.model": head["model"],
            "gen_ai.response.model": head["model"],
            "gen_ai.response.id": head["id"],
            "gen_ai.request.choice.count": len(records),
            "gen_ai.request.max_tokens": request.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k or None,
            "gen_ai.request.presence_penalty": sampling.presence_penalty or None,
            "gen_ai.request.frequency_penalty": sampling.frequency_penalty or None,
            "gen_ai.request.seed": sampling.seed if sampling.seed <= _MAX_INT else None,
            "gen_ai.response.finish_reasons": [each.outcome or "cancelled" for each in records],
            "gen_ai.usage.input_tokens": usage["prompt_tokens"],
            "gen_ai.usage.output_tokens": usage["completion_tokens"],
            "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "hippo.policy": records[0].policy,
            "hippo.is_calibration": records[0].is_calibration,
            "hippo.num_visual_tokens": choices.num_visual_tokens,
            "hippo.time_to_first_token_ms": (
                None if first is None else (first - records[0].received_ns) / 1e6
            ),
            "hippo.num_forwards": num_forwards,
            "hippo.num_draft_tokens": num_draft_tokens,
            "hippo.num_accepted_tokens": num_accepted,
            "hippo.acceptance_rate": num_accepted / num_draft_tokens if num_draft_tokens else None,
            "hippo.mean_tokens_per_forward": (
                1 + (num_accepted + total("num_accepted_reused")) / num_forwards
                if num_forwards
                else None
            ),
            "hippo.num_draft_losses": total("num_draft_losses"),
        }
    )
