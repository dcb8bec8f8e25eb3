"""The choice of the context length from the memory beside the weights."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hippo.models.context import SHARED_SLOTS, VIDEO_CONTEXT, choose_context


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


@pytest.mark.parametrize(
    ("num_tokens", "context", "num_slots"),
    [
        (1_000_000, 128_000, 7),  # a 7B model alone on 80 GB
        (88_000, 32_768, 2),  # a quantised 72B model
        (20_000, 19_968, 1),
    ],
)
def test_published_models(num_tokens: int, context: int, num_slots: int) -> None:
    """Qwen2.5-VL, whose limit is 128,000 tokens."""
    chosen = choose_context(128_000, None, lambda tokens, slots: tokens * slots <= num_tokens)
    assert chosen == context
    assert num_tokens // chosen == num_slots
