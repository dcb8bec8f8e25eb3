"""Computes scores of visual tokens from the queries that a prefill's taps have kept."""

from __future__ import annotations

from time import perf_counter_ns

import torch

from hippo.models.attention import QueryTap
from hippo.models.base import AttentionTap
from hippo.models.cache import KeyValueCache
from hippo.pruning.scores import attention_scores
from hippo.sizes import SCORED_ROWS
from hippo.transfer import to_device

KeptQueries = dict[int, list[torch.Tensor]]
"""By layer, one tensor ``[num_tapped, num_heads, head_dim]`` for each forward."""


def scored_rows(question: torch.Tensor) -> torch.Tensor:
    """Returns the rows of ``question`` (int64) whose queries score the visual tokens: all, or of a
    long question SCORED_ROWS evenly spaced ones, with its first and its last row."""
    num_rows = question.shape[0]
    if num_rows <= SCORED_ROWS:
        return question
    return question[torch.arange(SCORED_ROWS) * (num_rows - 1) // (SCORED_ROWS - 1)]


def tap_question(
    question: torch.Tensor, rows: slice, queries: KeptQueries, device: torch.device
) -> QueryTap | None:
    """Returns a tap that adds the queries of the rows of ``question`` (int64) within ``rows`` to
    ``queries``; None if there are no such rows."""
    tapped = question[(question >= rows.start) & (question < rows.stop)] - rows.start
    if not tapped.shape[0]:
        return None
    return QueryTap(to_device(tapped, device), queries)


def score_layers(
    tap: AttentionTap,
    queries: KeptQueries,
    scores: list[torch.Tensor],
    cache: KeyValueCache,
    slot: int,
    *,
    prompt_length: int,
    visual: torch.Tensor,
    scaling: float,
) -> None:
    """Adds the scores of the layers in ``queries`` to ``scores``, and empties ``queries``; sets the
    tap's scores if these are its last layers.

    ``visual`` holds the visual tokens' indices in the prompt (int64, on the cache's device). The
    slot must hold all ``prompt_length`` rows of these layers.
    """
    began_ns = perf_counter_ns()
    keys, _ = cache.seen(slot, prompt_length)
    for layer in sorted(queries):
        layer_scores = attention_scores(
            torch.cat(queries.pop(layer)),
            keys[layer][:, 0],
            scaling=scaling,
            visual=visual,
            scope=tap.scope,
        )
        scores.append(layer_scores)
    if len(scores) == tap.num_layers:
        tap.layer_scores = torch.stack(scores)
    tap.score_ns += perf_counter_ns() - began_ns
