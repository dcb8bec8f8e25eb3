"""The choice of the context length from the memory beside the weights."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hippo.base.config import SettingsError
from hippo.catalog.shapes import find_shape
from hippo.catalog.sizes import (
    DEVICE_BYTES,
    MOST_AUTO_SLOTS,
    RESERVED_BYTES,
    memory_of,
    slots_that_fit,
)
from hippo.models.interface.context import (
    SHARED_SLOTS,
    VIDEO_CONTEXT,
    choose_context,
    most_kept,
    pruned_cache_tokens,
    visual_limit,
)
from hippo.models.interface.plan import LoadPlan
from hippo.models.runners.captured import GRAPH_LAYER_BYTES, MOST_ROWS, most_graphs
from hippo.pruning.select import num_kept
from hippo.types import MIN_VISUAL_TOKENS, PRUNING_RATIO


@given(
    limit=st.integers(2, 200_000),
    num_tokens=st.integers(0, 2_000_000),
    num_slots=st.none() | st.integers(1, 40),
)
def test_the_choice_fits_and_a_longer_one_would_not(
    limit: int, num_tokens: int, num_slots: int | None
) -> None:
    """``num_tokens`` have room in all slots together."""

    def fits(context: int, slots: int) -> bool:
        return context * slots <= num_tokens

    context = choose_context(limit, num_slots, fits)
    assert 0 <= context <= limit
    needed = num_slots or (SHARED_SLOTS if context > VIDEO_CONTEXT else 1)
    if context:
        assert fits(context, needed)
    longer = min(limit, context + 256)
    if longer > context:
        assert not fits(longer, num_slots or (SHARED_SLOTS if longer > VIDEO_CONTEXT else 1))


@given(
    context=st.integers(64, 200_000),
    num_others=st.integers(0, 250_000),
    ceiling=st.none() | st.integers(1, 200_000),
)
def test_videos_have_one_limit_while_it_has_room_and_then_most_of_the_rest(
    context: int, num_others: int, ceiling: int | None
) -> None:
    limit, left = visual_limit(context, num_others, ceiling), context - num_others
    most = ceiling or context * 3 // 4
    if left >= most:
        assert limit == most
    else:
        assert left * 15 / 16 <= limit <= max(left, 1)


@given(context=st.integers(2, 200_000), num_others=st.integers(0, 200_000))
def test_a_draft_caches_text_answer_and_what_is_kept_of_the_longest_video(
    context: int, num_others: int
) -> None:
    cached = pruned_cache_tokens(context)
    num_others = min(num_others, context - visual_limit(context, 0))
    for num_visual in (context - num_others, min(context - num_others, MIN_VISUAL_TOKENS - 1)):
        is_pruned = num_visual >= MIN_VISUAL_TOKENS
        kept = num_kept(num_visual, PRUNING_RATIO) if is_pruned else num_visual
        assert num_others + kept <= cached <= context


def test_a_draft_caches_a_third_of_a_long_context_unless_the_operator_says_more() -> None:
    assert pruned_cache_tokens(VIDEO_CONTEXT) == 8192 + 2458
    assert pruned_cache_tokens(1024) == 256 + 512
    assert pruned_cache_tokens(600) == 600

    def cached(**changes: Any) -> int:
        return LoadPlan("m", **changes).slot_tokens(VIDEO_CONTEXT)

    assert cached() == VIDEO_CONTEXT
    assert cached(prunes=True) == 10_650
    assert cached(prunes=True, cache_tokens=20_000) == 20_000
    assert cached(prunes=True, cache_tokens=40_000) == VIDEO_CONTEXT
    with pytest.raises(SettingsError, match="--cache-tokens is 1; it must be at least 2"):
        cached(cache_tokens=1)


@pytest.mark.parametrize(
    ("cache_tokens", "num_others", "max_tokens", "most"),
    [
        (100, 30, 25, 45),
        (100, 30, 26, 45),  # an answer has at most a quarter
        (100, 30, 24, 46),
        (100, 75, 300, 0),
        (100, 120, 1, 0),
    ],
)
def test_visual_tokens_have_the_room_beside_text_and_an_answer(
    cache_tokens: int, num_others: int, max_tokens: int, most: int
) -> None:
    assert most_kept(cache_tokens, num_others, max_tokens) == most


@pytest.mark.parametrize(
    ("name", "layer_bits", "context", "num_slots"),
    [
        ("Qwen/Qwen2.5-VL-7B-Instruct", None, 128_000, 7),
        ("Qwen/Qwen2.5-VL-32B-Instruct", None, 32_768, 1),
        ("Qwen/Qwen2.5-VL-72B-Instruct", 4.25, 32_768, 3),  # nf4, and int4 with a scale
        ("Qwen/Qwen2.5-VL-72B-Instruct", 4.375, 32_768, 2),  # AWQ
    ],
)
def test_published_models_on_80_gb(
    name: str, layer_bits: float | None, context: int, num_slots: int
) -> None:
    shape = dataclasses.replace(find_shape(name), layer_bits=layer_bits)
    weights = memory_of(shape, num_tokens=1, num_slots=1).weights
    graphs = most_graphs(MOST_AUTO_SLOTS) * shape.num_layers * GRAPH_LAYER_BYTES
    graphs += MOST_ROWS * shape.num_head_parameters // shape.hidden_size * 4  # logits
    unpacked = 0 if layer_bits is None else 2 * shape.hidden_size * shape.mlp_width
    left = DEVICE_BYTES[80] - RESERVED_BYTES - weights - graphs - unpacked

    def num_fitting(tokens: int) -> int:
        one = memory_of(shape, num_tokens=tokens, num_slots=1)
        return slots_that_fit(
            left, slot_bytes=one.cache, work_bytes=one.work, reserved_bytes=one.earlier_media
        )

    chosen = choose_context(128_000, None, lambda tokens, slots: num_fitting(tokens) >= slots)
    assert (chosen, num_fitting(chosen)) == (context, num_slots)
