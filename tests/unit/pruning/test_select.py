"""Strategies that choose visual tokens without looking at them."""

from __future__ import annotations

import pytest
import torch

from hippo.pruning.select import num_kept, select_tokens
from hippo.types import Pruning, PruningStrategy


def select(strategy: PruningStrategy, num_tokens: int, ratio: float, seed: int = 0) -> list[int]:
    pruning = Pruning(strategy, ratio, seed)
    kept = select_tokens(pruning, ((1, 1, num_tokens),), num_tokens)
    assert kept.dtype == torch.int64
    return kept.tolist()


@pytest.mark.parametrize("strategy", [PruningStrategy.UNIFORM, PruningStrategy.RANDOM])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 7, 10, 64, 1000])
@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 0.9, 0.99])
def test_what_is_kept_is_ascending_distinct_and_as_many_as_the_ratio_says(
    strategy: PruningStrategy, num_tokens: int, ratio: float
) -> None:
    kept = select(strategy, num_tokens, ratio)
    assert len(kept) == num_kept(num_tokens, ratio)
    assert kept == sorted(set(kept))
    assert all(0 <= index < num_tokens for index in kept)


@pytest.mark.parametrize(
    ("num_tokens", "ratio", "expected"),
    [
        (10, 0.9, 1),
        (64, 0.9, 7),
        (100, 0.3, 70),
        (1, 0.99, 1),
        (0, 0.9, 0),
        (5, 0.0, 5),
        (100, 0.29, 71),  # in float64 the product is 28.999999999999996
        (1000, 0.57, 430),  # and this one 569.9999999999999
        (10_000, 0.00019, 9_999),  # a share is rounded down, however near it is to the next
        (24_576, 0.9, 2_458),
    ],
)
def test_the_number_kept_is_all_less_the_share_dropped_rounded_down(
    num_tokens: int, ratio: float, expected: int
) -> None:
    assert num_kept(num_tokens, ratio) == expected


@pytest.mark.parametrize("num_tokens", [0, 1, 64])
def test_none_keeps_all_and_blind_keeps_nothing_whatever_the_ratio(num_tokens: int) -> None:
    assert select(PruningStrategy.NONE, num_tokens, 0.9) == list(range(num_tokens))
    assert select(PruningStrategy.BLIND, num_tokens, 0.0) == []


def test_uniform_takes_the_middle_of_equal_stretches() -> None:
    assert select(PruningStrategy.UNIFORM, 10, 0.8) == [2, 7]
    assert select(PruningStrategy.UNIFORM, 9, 0.99) == [4]
    assert select(PruningStrategy.UNIFORM, 4, 0.0) == [0, 1, 2, 3]


def test_random_depends_on_its_seed_alone() -> None:
    torch.manual_seed(1)
    one = select(PruningStrategy.RANDOM, 1000, 0.9, seed=5)
    torch.manual_seed(2)
    assert select(PruningStrategy.RANDOM, 1000, 0.9, seed=5) == one
    assert select(PruningStrategy.RANDOM, 1000, 0.9, seed=6) != one
    assert len(select(PruningStrategy.RANDOM, 10, 0.5, seed=2**64 - 1)) == 5
