"""Scores of visual tokens, against plain loops over them."""

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hippo.pruning import scores as scores_module
from hippo.pruning.scores import Scope, alignment, attention_scores, distinctness, normalise
from hippo.types import SpatialScore
from tests.unit.pruning import reference
from tests.unit.pruning.reference import GRIDS, Grids, size_of

SPATIAL_SCORES = tuple(SpatialScore)


def some_features(grids: Grids, seed: int, hidden: int = 3) -> torch.Tensor:
    """Whole numbers from -2 to 2: equal, opposite and zero vectors are among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, (size_of(grids), hidden), generator=generator).float()


def assert_close(actual: torch.Tensor, expected: list[float]) -> None:
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-5, atol=2e-6)


@settings(deadline=None, max_examples=60)
@given(grids=GRIDS, seed=st.integers(0, 2**32), how=st.sampled_from(SPATIAL_SCORES))
def test_both_distinctness_scores_are_those_of_the_loops(
    grids: Grids, seed: int, how: SpatialScore
) -> None:
    features = some_features(grids, seed)
    temporal, spatial = distinctness(features, grids, spatial=how)
    assert_close(temporal, reference.temporal(features.tolist(), grids))
    assert_close(spatial, reference.spatial(features.tolist(), grids, how))


@settings(deadline=None, max_examples=60)
@given(
    num_queries=st.integers(1, 4),
    num_kv_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    num_tokens=st.integers(1, 12),
    scope=st.sampled_from(["visual", "causal"]),
    seed=st.integers(0, 2**32),
)
def test_attention_scores_are_those_of_the_loops(
    num_queries: int, num_kv_heads: int, groups: int, num_tokens: int, scope: Scope, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(num_queries, num_kv_heads * groups, 4, generator=generator)
    key = torch.randn(num_kv_heads, num_tokens, 4, generator=generator)
    num_visual = int(torch.randint(1, num_tokens + 1, (1,), generator=generator))
    visual = torch.randperm(num_tokens, generator=generator)[:num_visual].sort().values
    rows = torch.randint(0, num_tokens, (num_queries,), generator=generator).sort().values
    actual = attention_scores(query, key, scaling=0.5, visual=visual, scope=scope, rows=rows)
    expected = reference.attention(
        query.tolist(),
        key.tolist(),
        scaling=0.5,
        visual=visual.tolist(),
        scope=scope,
        rows=rows.tolist(),
    )
    assert_close(actual, expected)


@settings(deadline=None, max_examples=60)
@given(
    num_visual=st.integers(0, 12),
    num_text=st.integers(1, 4),
    per_block=st.integers(1, 5),
    seed=st.integers(0, 2**32),
)
def test_alignment_is_the_mean_cosine_of_the_loops(
    num_visual: int, num_text: int, per_block: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_visual + num_text + 3, 4, generator=generator)
    hidden[0] = 0.0
    order = torch.randperm(hidden.shape[0], generator=generator)
    visual, text = order[:num_visual], order[num_visual : num_visual + num_text]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scores_module, "SCORED_LOGITS", 4 * per_block)
        actual = alignment(hidden, visual, text)
    assert_close(actual, reference.alignment(hidden.tolist(), visual.tolist(), text.tolist()))


def test_blocks_of_queries_and_of_frames_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    grids = ((5, 3, 4), (1, 2, 2), (3, 3, 1))
    features = torch.randn(size_of(grids), 6, generator=torch.Generator().manual_seed(1))
    query = torch.randn(7, 4, 8, generator=torch.Generator().manual_seed(2))
    key = torch.randn(2, 30, 8, generator=torch.Generator().manual_seed(3))
    visual = torch.arange(4, 24)

    def scores() -> tuple[torch.Tensor, ...]:
        attended = (
            attention_scores(
                query, key, scaling=0.3, visual=visual, scope=scope, rows=torch.arange(7) + 20
            )
            for scope in get_args(Scope)
        )
        return (*distinctness(features, grids), *attended)

    whole = scores()
    for block_elements in (1, 2 * 12 * 6):  # one frame at a time; two of the first video's
        monkeypatch.setattr(scores_module, "_BLOCK_ELEMENTS_CPU", block_elements)
        monkeypatch.setattr(scores_module, "SCORED_LOGITS", block_elements)
        torch.testing.assert_close(scores(), whole)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_inputs_are_scored_in_float32(dtype: torch.dtype) -> None:
    grids = ((3, 4, 4),)
    features = torch.randn(48, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    query = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    key = torch.randn(2, 48, 16, generator=torch.Generator().manual_seed(2)).to(dtype)
    visual = torch.arange(48)
    half = attention_scores(query, key, scaling=1.0, visual=visual)
    full = attention_scores(query.float(), key.float(), scaling=1.0, visual=visual)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, full)
    torch.testing.assert_close(distinctness(features, grids), distinctness(features.float(), grids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_large_logits_do_not_overflow(dtype: torch.dtype) -> None:
    query = torch.full((1, 2, 4), 200.0, dtype=dtype)
    key = torch.zeros(1, 3, 4, dtype=dtype)
    key[0, 1] = 200.0
    scores = attention_scores(query, key, scaling=1.0, visual=torch.arange(3))
    assert scores.tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("how", SPATIAL_SCORES)
@pytest.mark.parametrize("hidden", [1, 7, 3584])
def test_tokens_that_do_not_differ_score_exactly_nothing(hidden: int, how: SpatialScore) -> None:
    """Rounding must not be stretched to full size by the normalisation that follows."""
    grids = ((3, 4, 5),)
    vector = torch.randn(hidden, generator=torch.Generator().manual_seed(0))
    lengths = torch.rand(60, 1, generator=torch.Generator().manual_seed(1)) + 0.5
    for score in distinctness(vector * lengths, grids, spatial=how):
        assert score.tolist() == [0.0] * 60


@pytest.mark.parametrize("how", SPATIAL_SCORES)
def test_the_spatial_score_does_not_favour_places_with_few_neighbours(how: SpatialScore) -> None:
    features = torch.randn(40 * 12 * 12, 32, generator=torch.Generator().manual_seed(0))
    score = distinctness(features, ((40, 12, 12),), spatial=how)[1].view(40, 12, 12)
    is_ring = torch.ones(12, 12, dtype=torch.bool)
    is_ring[1:-1, 1:-1] = False
    ring, inner = score[:, is_ring].mean().item(), score[:, ~is_ring].mean().item()
    assert ring == pytest.approx(inner, rel=0.03)


def test_no_tokens_have_no_scores() -> None:
    features = torch.zeros(0, 5)
    for grids in ((), ((0, 4, 4),)):
        assert [score.shape for score in distinctness(features, grids)] == [(0,), (0,)]
        assert normalise(torch.zeros(0), grids).shape == (0,)
