"""How likely tokens were, taken in the step that chooses them.

Log-probabilities are the log-softmax of the logits as the model gave them, before penalties, bias,
temperature and filters, so they do not depend on the sampling parameters (vLLM's default,
``raw_logprobs``). Only sequences that ask for them cost anything.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Sequence

import torch

from hippo.sampling.sampler import SampleRequest, check_usable, choose_step, split_rows
from hippo.types import TokenLogprobs

Logprobs = list[TokenLogprobs]


def sample_with_logprobs(
    requests: Sequence[SampleRequest],
    logits: torch.Tensor,
    *,
    num_rows: Sequence[int],
    num_top: Sequence[int | None],
) -> tuple[list[list[int]], list[Logprobs]]:
    """The tokens of ``sample_step``, and of each its log-probability with that of the likeliest
    ids: ``num_top[s]`` of them (None: nothing for this sequence). One wait for the device.
    """
    chosen = choose_step(requests, logits, num_rows=num_rows)
    parts = [chosen]
    begins = itertools.accumulate(num_rows, initial=0)
    for begin, count, wanted in zip(begins, num_rows, num_top, strict=False):
        if wanted is not None:
            end = begin + count
            parts += _measure(logits[begin:end], chosen[begin:end], wanted)
    # One copy from the device: numbers travel as the bits of float64 in the ids' int64.
    values = iter(torch.cat(parts).tolist())
    token_ids = check_usable(list(itertools.islice(values, chosen.shape[0])))
    width = logits.shape[1]
    logprobs: list[Logprobs] = [
        [] if wanted is None else _read(values, count, min(wanted, width))
        for count, wanted in zip(num_rows, num_top, strict=True)
    ]
    return split_rows(token_ids, num_rows), logprobs


def _measure(logits: torch.Tensor, chosen: torch.Tensor, num_top: int) -> list[torch.Tensor]:
    """Flat int64 tensors: log-probabilities of ``chosen`` ``[rows]``, the likeliest ids
    ``[rows * num_top]`` and their log-probabilities."""
    normaliser = logits.logsumexp(dim=-1, keepdim=True)  # [rows, 1]
    own = logits.gather(1, chosen.clamp(min=0)[:, None]) - normaliser
    if not num_top:
        return [_bits(own)]
    top, ids = logits.topk(min(num_top, logits.shape[1]), dim=-1)
    return [_bits(own), ids.flatten(), _bits(top - normaliser)]


def _bits(logprobs: torch.Tensor) -> torch.Tensor:
    # Rounding may leave a certain token a little above 0.
    return logprobs.clamp(max=0.0).double().view(torch.int64).flatten()


def _read(values: Iterator[int], num_rows: int, num_top: int) -> Logprobs:
    """The other side of ``_measure``."""
    own = _floats(itertools.islice(values, num_rows))
    ids = list(itertools.islice(values, num_rows * num_top))
    top = list(zip(ids, _floats(itertools.islice(values, num_rows * num_top)), strict=True))
    return [
        TokenLogprobs(logprob, tuple(top[row * num_top : (row + 1) * num_top]))
        for row, logprob in enumerate(own)
    ]


def _floats(bits: Iterator[int]) -> list[float]:
    return array("d", array("q", bits).tobytes()).tolist()
