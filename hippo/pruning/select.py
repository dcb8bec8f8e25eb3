"""Strategies that choose the visual tokens the draft sees without looking at them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hippo.types import Pruning, PruningStrategy


def num_kept(num_visual_tokens: int, ratio: float) -> int:
    """How many of the tokens stay: ``N - floor(ratio * N)``, so at least one if there is one.

    The product is rounded to nine decimals first: 0.9 of 10 tokens are 9, not 8.99....
    """
    return num_visual_tokens - int(round(ratio * num_visual_tokens, 9))


def select_tokens(
    pruning: Pruning, visual_grids: Sequence[tuple[int, int, int]], num_visual_tokens: int
) -> torch.Tensor:
    """The kept visual tokens of a prompt: int64 ``[num_kept]``, ascending, on the CPU.

    ``none`` keeps all and ``blind`` none, whatever the ratio. ``uniform`` takes the middle of
    each of ``num_kept`` equal stretches of the token sequence, ``random`` a sample that depends
    on the seed and the number of tokens alone. ``visual_grids`` are (frames, rows, columns).
    """
    total = sum(frames * rows * columns for frames, rows, columns in visual_grids)
    assert total == num_visual_tokens, (visual_grids, num_visual_tokens)
    match pruning.strategy:
        case PruningStrategy.NONE:
            return torch.arange(num_visual_tokens)
        case PruningStrategy.BLIND:
            return torch.empty(0, dtype=torch.int64)
        case PruningStrategy.UNIFORM:
            kept = num_kept(num_visual_tokens, pruning.ratio)
            # (2i + 1) N / 2k in whole numbers: exact, strictly increasing, below N.
            return (2 * torch.arange(kept) + 1) * num_visual_tokens // max(1, 2 * kept)
        case PruningStrategy.RANDOM:
            kept = num_kept(num_visual_tokens, pruning.ratio)
            generator = torch.Generator().manual_seed(pruning.seed % 2**63)
            order = torch.randperm(num_visual_tokens, generator=generator)
            return order[:kept].sort().values
