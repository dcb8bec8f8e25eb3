"""Sampling of the tokens of all steps of one forward, with one wait for the device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from hippo.engine.sequence import EngineSequence
from hippo.sampling.sampler import RowNotes, SampleRequest, sample_step
from hippo.speculation.core import Step
from hippo.transfer import to_device


def start_masks(steps: Sequence[tuple[EngineSequence, Step]]) -> None:
    """Starts the masks of all steps with a grammar, which are computed beside the forward."""
    for sequence, step in steps:
        if (masks := sequence.sampler.masks) is not None:
            masks.start(sequence.core.history(step), step.guess)


def sample_steps(
    steps: Sequence[tuple[EngineSequence, Step]], logits: torch.Tensor
) -> list[tuple[list[int], RowNotes]]:
    """Returns each step's tokens, one per used row, and the notes of these rows.

    ``logits`` ``[rows, vocabulary]`` cover all rows of the forward, or only the used rows.
    """
    if logits.shape[0] != sum(step.num_guessed + 1 for _, step in steps):
        logits = logits.index_select(0, to_device(_used_rows(steps), logits.device))
    requests = [
        SampleRequest(
            sequence.sampler, sequence.core.history(step), step.guess, sequence.num_top_logprobs
        )
        for sequence, step in steps
    ]
    return sample_step(requests, logits)


def _used_rows(steps: Sequence[tuple[EngineSequence, Step]]) -> list[int]:
    """Returns the indices of each step's last ``num_guessed + 1`` rows in the forward."""
    ends = itertools.accumulate(len(step.token_ids) for _, step in steps)
    return [
        row
        for end, (_, step) in zip(ends, steps, strict=True)
        for row in range(end - step.num_guessed - 1, end)
    ]
