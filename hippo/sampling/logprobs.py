"""Log-probabilities of the chosen and the likeliest tokens, computed in the sampling step.

Log-probabilities are the log-softmax of the model's logits before penalties, bias, temperature and
filters, so they do not depend on the sampling parameters (vLLM's default, ``raw_logprobs``). They
are computed only for sequences that ask for them.
"""

import itertools
from array import array
from collections.abc import Iterable, Iterator

import torch

from hippo.types import TokenLogprobs


def pack_logprobs(logits: torch.Tensor, chosen: torch.Tensor, num_top: int) -> list[torch.Tensor]:
    """Returns flat int64 tensors: log-probabilities of ``chosen`` ``[rows]``, the likeliest ids
    ``[rows * num_top]`` and their log-probabilities. Log-probabilities are the bits of float64.

    ``logits`` are ``[rows, num_ids]``. With fewer than ``num_top`` ids, all ids are taken.
    """
    normaliser = logits.logsumexp(dim=-1, keepdim=True)  # [rows, 1]
    own = logits.gather(1, chosen.clamp(min=0)[:, None]) - normaliser
    if not num_top:
        return [_bits(own)]
    top, ids = logits.topk(min(num_top, logits.shape[1]), dim=-1)
    return [_bits(own), ids.flatten(), _bits(top - normaliser)]


def _bits(logprobs: torch.Tensor) -> torch.Tensor:
    # Rounding may lift the log-probability of a certain token above 0.
    return logprobs.clamp(max=0.0).double().view(torch.int64).flatten()


def unpack_logprobs(
    values: Iterator[int], num_rows: int, num_top: int, num_ids: int
) -> list[TokenLogprobs]:
    """Reads the log-probabilities of each row from the numbers of ``pack_logprobs``."""
    num_top = min(num_top, num_ids)
    own = floats(itertools.islice(values, num_rows))
    ids = list(itertools.islice(values, num_rows * num_top))
    top = list(zip(ids, floats(itertools.islice(values, num_rows * num_top)), strict=True))
    return [
        TokenLogprobs(logprob, tuple(top[row * num_top : (row + 1) * num_top]))
        for row, logprob in enumerate(own)
    ]


def floats(bits: Iterable[int]) -> list[float]:
    """Returns the float64 numbers of these bits."""
    return array("d", array("q", bits).tobytes()).tolist()
