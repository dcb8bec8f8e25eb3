"""What a draft would say: its likeliest tokens with their chances, along an answer and off it."""

import math
from collections.abc import Sequence

import torch

from hippo.models.interface.base import SequenceRows, StepPlan, VideoLanguageModel
from hippo.sampling.noise import noise_key, noise_rows
from hippo.types import SamplingParams

NUM_CHOICES = 3
_FOLLOWED = 12  # tokens recorded behind a wrong one

Choices = list[tuple[int, float]]
"""The likeliest tokens of a place with their chances, the likeliest first."""


def choices_of(
    logits: torch.Tensor, params: SamplingParams, first_index: int, sharpness: float = 1.0
) -> list[Choices]:
    """Returns the choices of each row of ``logits`` ``[rows, num_token_ids]``; the first row's
    token has the completion index ``first_index``.

    At a temperature above 0 they are ordered by the scores of the token rule, noise included, with
    the draft's ``sharpness``; a chance is the softmax of these scores.
    """
    scores = logits.double()
    if params.temperature > 0.0:
        scores = scores / params.temperature
        if sharpness != math.inf:
            rows, width = scores.shape
            indices = range(first_index, first_index + rows)
            key = noise_key(params.seed, params.choice_index)
            scores = scores * sharpness + noise_rows(key, indices, width, "cpu")
    best = scores.softmax(-1).topk(NUM_CHOICES)
    return [
        [(token_id, round(chance, 5)) for token_id, chance in zip(ids, chances, strict=True)]
        for ids, chances in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def broken_runs(
    draft: VideoLanguageModel,
    output: Sequence[int],
    top: Sequence[Choices],
    params: SamplingParams,
    sharpness: float,
) -> dict[int, list[Choices]]:
    """Returns by index of each wrong first choice what the draft says behind it, as far as it
    follows its own first choices, up to an end token. The draft has read ``output``, of which only
    the first token is left in its cache."""
    ends, runs = draft.info.end_token_ids, {}
    for index in range(len(output) - 1, -1, -1):  # backwards: what lies behind is needed no more
        token_id = top[index][0][0]
        if token_id == output[index]:
            continue
        run: list[Choices] = []
        for place in range(index, min(index + _FOLLOWED, len(output) - 1)):
            if token_id in ends:
                break
            logits = draft.forward(StepPlan((SequenceRows(0, place, (token_id,)),)))
            run += choices_of(logits, params, place + 1, sharpness)
            token_id = run[-1][0][0]
        runs[index] = run
    return runs
