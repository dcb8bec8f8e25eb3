"""Computes scores of visual tokens from the queries that a prefill's taps have kept."""

from __future__ import annotations

from time import perf_counter_ns

import torch

from hippo.models.attention import QueryTap
from hippo.models.base import AttentionTap
from hippo.models.cache import KeyValueCache
from hippo.pruning.scores import attention_scores
from hippo.transfer import to_device

KeptQueries = dict[int, list[torch.Tensor]]
"""By layer, one tensor ``[num_tapped, num_heads, head_dim]`` for each forward."""


def tap_question(
    question: torch.Tensor, rows: slice, queries: KeptQueries, device: torch.device
) -> QueryTap | None:
    """Returns a tap that adds the queries of the rows of ``question`` (int64) within ``rows`` to
    ``queries``; None if there are no such rows."""
    tapped = question[(question >= rows.start) & (question < rows.stop)] - rows.start
    if not tapped.shape[0]:
        return None
    return QueryTap(to_device(tapped, device), queries)


def fill_tap(
    tap: AttentionTap,
    queries: KeptQueries,
    cache: KeyValueCache,
    slot: int,
    *,
    prompt_length: int,
    visual: torch.Tensor,
    scaling: float,
) -> None:
    """Computes the tap's scores and empties ``queries``.

    ``visual`` holds the visual tokens' indices in the prompt (int64, on the cache's device). The
    slot must hold all ``prompt_length`` rows of the tapped layers.
    """
    began_ns = perf_counter_ns()
    if queries:
        keys, _ = cache.seen(slot, prompt_length)
        scores = [
            attention_scores(
                torch.cat(queries[layer]),
                keys[layer][:, 0],
                scaling=scaling,
                visual=visual,
                scope=tap.scope,
            )
            for layer in range(tap.num_layers)
        ]
        tap.layer_scores = torch.stack(scores)
    else:  # no visual tokens, hence no question
        tap.layer_scores = torch.empty(tap.num_layers, 0, device=cache.device)
    tap.score_ns = perf_counter_ns() - began_ns
    queries.clear()
