"""Computes scores of visual tokens from the queries that a prefill's taps have kept, or from the
hidden states between its layers."""

from __future__ import annotations

from time import perf_counter_ns

import torch

from hippo.catalog.sizes import SCORED_ROWS
from hippo.models.attention.cache import KeyValueCache
from hippo.models.attention.parts import QueryTap
from hippo.models.interface.base import AttentionTap, Prompt
from hippo.models.interface.transfer import to_device
from hippo.pruning.scores import alignment, attention_scores

KeptQueries = dict[int, list[torch.Tensor]]
"""By layer, one tensor ``[num_tapped, num_heads, head_dim]`` for each forward."""


def scored_rows(tap: AttentionTap, prompt: Prompt) -> torch.Tensor:
    """Returns the prompt's rows that score the visual tokens (int64, ascending): those of the tap's
    text, or of a long text SCORED_ROWS evenly spaced ones, with its first and its last row."""
    text = prompt.question_indices
    if tap.scope == "causal":
        text = torch.arange(int(prompt.visual_indices[-1]) + 1, prompt.length)
        text = text[~torch.isin(text, prompt.other_indices)]
    num_rows = text.shape[0]
    if num_rows <= SCORED_ROWS:
        return text
    return text[torch.arange(SCORED_ROWS) * (num_rows - 1) // (SCORED_ROWS - 1)]


def most_reused(tap: AttentionTap, prompt: Prompt) -> int:
    """Returns how many of a prompt's first rows a tapped prefill may reuse: scores need the text's
    queries, and alignment also the hidden states of the visual tokens."""
    needed = [scored_rows(tap, prompt)]
    if tap.is_alignment:
        needed.append(prompt.visual_indices)
    return min(int(rows[0]) for rows in needed)


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
    rows: torch.Tensor,
    scaling: float,
) -> None:
    """Adds the scores of the layers in ``queries`` to ``scores``, and empties ``queries``; sets the
    tap's scores if these are its last layers.

    ``visual`` and ``rows`` hold the indices in the prompt of the visual tokens and of the queries
    (int64, on the cache's device). The slot must hold all ``prompt_length`` rows of these layers.
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
            rows=rows,
        )
        scores.append(layer_scores)
    if len(scores) == tap.num_layers:
        tap.layer_scores = torch.stack(scores)
    tap.score_ns += perf_counter_ns() - began_ns


def measure_alignment(
    tap: AttentionTap,
    hidden: torch.Tensor,
    scores: list[torch.Tensor],
    *,
    visual: torch.Tensor,
    text: torch.Tensor,
) -> None:
    """Adds the alignment of ``hidden`` ``[rows, hidden]`` to ``scores``; sets the tap's scores if
    this is the second one, behind the tap's last layer.

    ``visual`` and ``text`` are indices of rows of ``hidden`` (int64, on its device).
    """
    began_ns = perf_counter_ns()
    scores.append(alignment(hidden, visual, text))
    if len(scores) == 2:
        tap.layer_scores = (scores[1] - scores[0])[None]
    tap.score_ns += perf_counter_ns() - began_ns
