"""Which visual tokens each strategy chooses, blindly or by what the target saw in them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hippo.pruning.scores import distinctness
from hippo.pruning.select import (
    SelectionOptions,
    VisualScores,
    holistic_scores,
    needs_attention,
    needs_features,
    num_kept,
    select_tokens,
)
from hippo.types import Pruning, PruningStrategy, SpatialScore
from tests.unit.pruning import reference
from tests.unit.pruning.reference import GRIDS, Grids, size_of

SCORED = [strategy for strategy in PruningStrategy if needs_attention(strategy)]
RATIOS = st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.99, 1.0])
SEEDS = st.integers(0, 2**32)


def some_attention(grids: Grids, seed: int) -> torch.Tensor:
    """Multiples of 1/64, many of them equal: sums of them are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 16, (size_of(grids),), generator=generator).float() / 64


def some_features(grids: Grids, seed: int, hidden: int = 8) -> torch.Tensor:
    return torch.randn(size_of(grids), hidden, generator=torch.Generator().manual_seed(seed))


def select(
    strategy: PruningStrategy,
    grids: Grids,
    ratio: float,
    attention: torch.Tensor | None,
    features: torch.Tensor | None = None,
    **options: object,
) -> list[int]:
    kept = select_tokens(
        Pruning(strategy, ratio),
        grids,
        size_of(grids),
        VisualScores(attention, features),
        SelectionOptions(**options),  # type: ignore[arg-type]
    )
    assert kept.dtype == torch.int64
    return kept.tolist()


def select_blind(
    strategy: PruningStrategy, num_tokens: int, ratio: float, seed: int = 0
) -> list[int]:
    return select_tokens(Pruning(strategy, ratio, seed), ((1, 1, num_tokens),), num_tokens).tolist()


@pytest.mark.parametrize("strategy", [PruningStrategy.UNIFORM, PruningStrategy.RANDOM])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 7, 10, 64, 1000])
@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 0.9, 0.99])
def test_what_is_kept_is_ascending_distinct_and_as_many_as_the_ratio_says(
    strategy: PruningStrategy, num_tokens: int, ratio: float
) -> None:
    kept = select_blind(strategy, num_tokens, ratio)
    assert len(kept) == num_kept(num_tokens, ratio)
    assert kept == sorted({*kept} & {*range(num_tokens)})


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
    assert select_blind(PruningStrategy.NONE, num_tokens, 0.9) == list(range(num_tokens))
    assert select_blind(PruningStrategy.BLIND, num_tokens, 0.0) == []


def test_uniform_takes_the_middle_of_equal_stretches() -> None:
    assert select_blind(PruningStrategy.UNIFORM, 10, 0.8) == [2, 7]
    assert select_blind(PruningStrategy.UNIFORM, 9, 0.99) == [4]
    assert select_blind(PruningStrategy.UNIFORM, 4, 0.0) == [0, 1, 2, 3]


def test_random_depends_on_its_seed_alone() -> None:
    torch.manual_seed(1)
    one = select_blind(PruningStrategy.RANDOM, 1000, 0.9, seed=5)
    torch.manual_seed(2)
    assert select_blind(PruningStrategy.RANDOM, 1000, 0.9, seed=5) == one
    assert select_blind(PruningStrategy.RANDOM, 1000, 0.9, seed=6) != one
    assert len(select_blind(PruningStrategy.RANDOM, 10, 0.5, seed=2**64 - 1)) == 5


@settings(deadline=None, max_examples=60)
@given(grids=GRIDS, ratio=RATIOS, seed=SEEDS)
def test_attention_keeps_the_most_attended_to_and_of_equal_ones_the_first(
    grids: Grids, ratio: float, seed: int
) -> None:
    attention = some_attention(grids, seed)
    expected = reference.best(attention.tolist(), num_kept(size_of(grids), ratio))
    assert select(PruningStrategy.ATTENTION, grids, ratio, attention) == expected


@settings(deadline=None, max_examples=60)
@given(
    grids=GRIDS,
    ratio=RATIOS,
    seed=SEEDS,
    how=st.sampled_from(SpatialScore),
    spread=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    weights=st.sampled_from([(1.0, 1.0, 1.0), (1.0, 0.0, 0.0), (0.5, 2.0, 1.0)]),
)
def test_holistic_scores_are_the_weighted_sum_of_the_three_normalised_ones(
    grids: Grids,
    ratio: float,
    seed: int,
    how: SpatialScore,
    spread: float,
    weights: tuple[float, float, float],
) -> None:
    attention, features = some_attention(grids, seed), some_features(grids, seed)
    parts = [
        reference.normalised(scores, grids)
        for scores in (
            attention.tolist(),
            reference.temporal(features.tolist(), grids),
            reference.spatial(features.tolist(), grids, how),
        )
    ]
    expected = [
        sum(weight * part[token] for weight, part in zip(weights, parts, strict=True))
        for token in range(size_of(grids))
    ]
    temporal, spatial = distinctness(features, grids, spatial=how)
    actual = holistic_scores(attention, temporal, spatial, grids, weights)
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-3, atol=1e-3)
    options = {"spatial": how, "weights": weights, "spread": spread}
    kept = select(PruningStrategy.HOLISTIC, grids, ratio, attention, features, **options)
    number = num_kept(size_of(grids), ratio)
    best = reference.best(actual.tolist(), number - int(spread * number + 0.5))
    assert kept == reference.filled_evenly(actual.tolist(), best, number)


@settings(deadline=None, max_examples=100)
@given(
    grids=GRIDS, ratio=RATIOS, seed=SEEDS, share=st.sampled_from([0.0, 0.25, 0.375, 0.5, 0.75, 1.0])
)
def test_specvlm_keeps_a_share_of_the_attention_and_fills_up_evenly(
    grids: Grids, ratio: float, seed: int, share: float
) -> None:
    attention = some_attention(grids, seed)
    kept = num_kept(size_of(grids), ratio)
    expected = reference.two_stages(attention.tolist(), kept, share)
    actual = select(PruningStrategy.SPECVLM, grids, ratio, attention, specvlm_mass=share)
    assert actual == expected


def test_uv_keeps_the_tokens_whose_alignment_grows_most_and_of_equal_ones_the_first() -> None:
    growth = torch.tensor([-0.5, 0.25, -1.0, 0.25, 0.5, 0.25])
    kept = select_tokens(
        Pruning(PruningStrategy.UV, 0.5), ((1, 2, 3),), 6, VisualScores(alignment=growth)
    )
    assert kept.tolist() == [1, 3, 4]
    with pytest.raises(ValueError, match=r"'uv' needs scores\.alignment"):
        select_tokens(Pruning(PruningStrategy.UV), ((1, 2, 3),), 6, VisualScores(growth))


@pytest.mark.parametrize("strategy", SCORED)
def test_missing_scores_are_a_programming_error(strategy: PruningStrategy) -> None:
    grids = ((2, 3, 3),)
    attention, features = some_attention(grids, 0), some_features(grids, 0)
    with pytest.raises(ValueError, match=r"needs scores\.attention"):
        select_tokens(Pruning(strategy), grids, 18)
    with pytest.raises(ValueError, match="is of 17 tokens; the prompt has 18"):
        select(strategy, grids, 0.9, attention[:17], features)
    if needs_features(strategy):
        with pytest.raises(ValueError, match=r"needs scores\.features"):
            select(strategy, grids, 0.9, attention)


@pytest.mark.parametrize("strategy", list(PruningStrategy))
def test_a_prompt_without_video_needs_no_scores(strategy: PruningStrategy) -> None:
    assert select_tokens(Pruning(strategy), (), 0).tolist() == []


@pytest.mark.parametrize("name", ["spread", "specvlm_mass"])
@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_shares_of_options_are_0_to_1(name: str, share: float) -> None:
    with pytest.raises(ValueError, match=name):
        SelectionOptions(**{name: share})  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", SCORED)
def test_nothing_waits_for_the_device(strategy: PruningStrategy) -> None:
    """Tensors without values: whatever had to read one would fail."""
    grids = ((3, 4, 4), (2, 3, 5))
    scores = VisualScores(
        torch.empty(78, device="meta"), torch.empty(78, 8, device="meta", dtype=torch.bfloat16)
    )
    kept = select_tokens(Pruning(strategy, 0.9), grids, 78, scores)
    assert kept.device.type == "meta"
    assert kept.shape == (num_kept(78, 0.9),)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("strategy", SCORED)
def test_a_gpu_keeps_what_the_cpu_does(strategy: PruningStrategy) -> None:
    grids = ((3, 4, 4), (2, 3, 5))
    attention, features = some_attention(grids, 0), some_features(grids, 0)
    on_cpu = select(strategy, grids, 0.8, attention, features)
    assert select(strategy, grids, 0.8, attention.cuda(), features.cuda()) == on_cpu
