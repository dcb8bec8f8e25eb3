"""Tokens of all steps of one forward: the one wait for the device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from hippo.engine.sequence import EngineSequence
from hippo.sampling import SampleRequest, sample_step, sample_with_logprobs
from hippo.speculation.core import Step
from hippo.transfer import to_device
from hippo.types import TokenLogprobs


def sample_steps(
    steps: Sequence[tuple[EngineSequence, Step]], logits: torch.Tensor
) -> list[tuple[list[int], list[TokenLogprobs]]]:
    """Each step's tokens, one a row of use, with log-probabilities where they were asked for.

    ``logits`` (rows, ids) are of all rows of the forward, or of those of use alone.
    """
    num_rows = [step.num_guessed + 1 for _, step in steps]
    if logits.shape[0] != sum(num_rows):
        logits = logits.index_select(0, to_device(_used_rows(steps), logits.device))
    requests = [
        SampleRequest(sequence.sampler, step.first_index, sequence.core.history(step), step.guess)
        for sequence, step in steps
    ]
    num_top = [sequence.num_top_logprobs for sequence, _ in steps]
    if all(wanted is None for wanted in num_top):
        token_ids = sample_step(requests, logits, num_rows=num_rows)
        return [(ids, []) for ids in token_ids]
    token_ids, logprobs = sample_with_logprobs(requests, logits, num_rows=num_rows, num_top=num_top)
    return list(zip(token_ids, logprobs, strict=True))


def _used_rows(steps: Sequence[tuple[EngineSequence, Step]]) -> list[int]:
    """The last rows of each step."""
    ends = itertools.accumulate(len(step.token_ids) for _, step in steps)
    return [
        row
        for end, (_, step) in zip(ends, steps, strict=True)
        for row in range(end - step.num_guessed - 1, end)
    ]
