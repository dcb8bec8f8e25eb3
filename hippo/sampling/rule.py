"""The token rule as pure functions on tensors: penalties and bias, temperature, filters, choice."""

import math

import torch

from hippo.speculation.sharpness import SHARPNESSES
from hippo.types import SamplingParams

_UNIT = 2.0**44  # weight of the likeliest token in the fixed-point arithmetic of top-p


def penalise(
    logits: torch.Tensor,
    params: SamplingParams,
    *,
    prompt_mask: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns penalised and biased float32 logits ``[rows, num_ids]``; does not change ``logits``.

    ``prompt_mask`` (bool ``[num_ids]``) marks ids in the prompt, and ``counts`` (integers
    ``[rows, num_ids]``) says how often each id occurs in a row's output so far; penalties need
    them. The repetition penalty applies to ids in the prompt or the output: it divides positive
    logits and multiplies negative logits. The presence and frequency penalties apply to ids in the
    output only. ``bias`` (float32 ``[num_ids]``) is added last.
    """
    if counts is not None:
        if params.repetition_penalty != 1.0:
            assert prompt_mask is not None
            factor = params.repetition_penalty
            repeated = torch.where(logits > 0, logits / factor, logits * factor)
            logits = torch.where((counts > 0) | prompt_mask, repeated, logits)
        if params.frequency_penalty != 0.0:
            logits = logits - params.frequency_penalty * counts
        if params.presence_penalty != 0.0:
            logits = logits - params.presence_penalty * (counts > 0)
    return logits if bias is None else logits + bias


def keep_mask(scaled: torch.Tensor, params: SamplingParams) -> torch.Tensor | None:
    """Marks the ids kept by top-k, then top-p, then min-p: bool ``[rows, num_ids]``; None: all.

    ``scaled`` (float64 ``[rows, num_ids]``) are log-probabilities shifted so that the largest of
    each row is 0. Top-k keeps exactly k ids, and top-p the smallest set that holds the probability
    mass. Of equal logits, both keep the lower id. At least one id is kept.
    """
    num_ids = scaled.shape[-1]
    keep: torch.Tensor | None = None
    if 0 < params.top_k < num_ids:
        least = scaled.topk(params.top_k, dim=-1).values[:, -1:]  # [rows, 1]
        above = scaled > least
        ties = scaled == least
        num_ties = params.top_k - above.sum(dim=-1, keepdim=True)
        keep = above | (ties & (ties.cumsum(dim=-1) <= num_ties))
    if params.top_p < 1.0:
        # Fixed point, because integer sums do not depend on the order of a device's additions. So
        # a row gives the same set alone and in a block.
        masked = scaled if keep is None else scaled.masked_fill(~keep, -math.inf)
        values, order = masked.sort(dim=-1, descending=True, stable=True)
        weights = values.exp().mul_(_UNIT).long()
        sums = weights.cumsum(dim=-1)
        within = (sums - weights).double() < params.top_p * sums[:, -1:].double()
        keep = torch.zeros_like(within).scatter_(-1, order, within)
    if params.min_p > 0.0:
        likely = scaled >= math.log(params.min_p)
        keep = likely if keep is None else keep & likely
    return keep


def choose_tokens(
    logits: torch.Tensor, params: SamplingParams, *, noise: torch.Tensor | None = None
) -> torch.Tensor:
    """Chooses a token id per row: int64 ``[rows]`` on the device of ``logits``; -1: unusable row.

    ``logits`` are what ``penalise`` returned; minus infinity excludes an id. A row with NaN, with
    plus infinity or without any finite logit is unusable. ``noise`` (float64 ``[rows, num_ids]``)
    is needed at a temperature above 0.
    """
    largest, chosen = logits.max(dim=-1)  # the first of equal logits; NaN counts as the largest
    if params.temperature > 0.0:
        assert noise is not None, "a temperature above 0 needs noise"
        chosen = (noise + _scale(logits, largest, params)).argmax(dim=-1)
    return chosen.where(largest.isfinite(), -1)


def propose_tokens(
    logits: torch.Tensor,
    params: SamplingParams,
    *,
    sharpness_place: int = 0,
    noise: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns a draft's choices for each row: int64 ``[rows, numbers]`` on the device.

    A row has its first and second choice, and their scores as the bits of float64; then, at a
    temperature above 0, the first choices at all of SHARPNESSES (see
    :mod:`hippo.speculation.sharpness`). The scores are those at the sharpness of that place; the
    first is not finite if the row is unusable. For the arguments see ``choose_tokens``.
    """
    if params.temperature <= 0.0:
        return _best_two(logits)
    assert noise is not None, "a temperature above 0 needs noise"
    scaled = _scale(logits, logits.amax(dim=-1), params)
    scores = [
        scaled if sharpness == math.inf else torch.add(noise, scaled, alpha=sharpness)
        for sharpness in SHARPNESSES
    ]
    choices = torch.stack([each.argmax(dim=-1) for each in scores], dim=1)
    return torch.cat((_best_two(scores[sharpness_place]), choices), dim=1)


def _scale(logits: torch.Tensor, largest: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Returns the scaled and filtered logits, 0 for the ``largest`` of each row ``[rows]``."""
    scaled = (logits - largest[:, None]).double().div_(params.temperature)
    keep = keep_mask(scaled, params)
    return scaled if keep is None else scaled.masked_fill_(~keep, -math.inf)


def _best_two(scores: torch.Tensor) -> torch.Tensor:
    # Not by topk, which promises no order of equal scores: the lowest id wins, as in the target.
    first, first_ids = scores.max(dim=-1, keepdim=True)
    second, second_ids = scores.scatter(1, first_ids, -math.inf).max(dim=-1, keepdim=True)
    values = torch.cat((first, second), dim=1).double()
    return torch.cat((first_ids, second_ids, values.view(torch.int64)), dim=1)
