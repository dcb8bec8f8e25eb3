"""What a chat completion's span says: OpenTelemetry's ``gen_ai`` attributes, and hippo's own."""

from __future__ import annotations

from typing import Any

from gateway.answer.choices import Choices
from hippo.base.tracing import current_span
from hippo.types import OpenRequest

_MAX_INT = 2**63 - 1  # of an attribute


def describe_answer(head: dict[str, Any], request: OpenRequest, choices: Choices) -> None:
    """Describes an answer, finished or not, in the request's span; ``head`` has its id and model.

    Counts and rates are over all choices of the request.
    """
    span = current_span()
    if not span.is_recording:
        return
    records, sampling = choices.records, request.sampling
    stats = [record.stats for record in records]
    num_forwards = sum(each.num_forwards for each in stats)
    num_draft_tokens = sum(each.num_draft_tokens for each in stats)
    num_accepted = sum(each.num_accepted_tokens for each in stats)
    num_reused = sum(each.num_accepted_reused for each in stats)
    first = min((each.first_verdict_ns for each in records if each.first_verdict_ns), default=None)
    outcomes = [record.outcome or "cancelled" for record in records]
    usage = choices.usage
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
            "gen_ai.response.finish_reasons": outcomes,
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
                1 + (num_accepted + num_reused) / num_forwards if num_forwards else None
            ),
            "hippo.num_draft_losses": sum(each.num_draft_losses for each in stats),
        }
    )
