"""Attention over several slots in one call, held against plain arithmetic."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from hippo.models.attention.batch import group_rows, plan_batch
from hippo.models.attention.cache import CacheShape, KeyValueCache
from hippo.models.attention.parts import AttentionPlan, attend
from hippo.models.attention.rows import PlacedRows

LAYER, SCALING = 1, 0.25
GROUPS, KV_HEADS, HEAD_DIM = 3, 2, 8


def new_cache(num_slots: int = 6, capacity: int = 320) -> KeyValueCache:
    shape = CacheShape(
        num_layers=2,
        num_slots=num_slots,
        num_kv_heads=KV_HEADS,
        capacity=capacity,
        head_dim=HEAD_DIM,
    )
    return KeyValueCache(shape, dtype=torch.float32, device=torch.device("cpu"))


def placed(slot: int, start: int, num_rows: int) -> PlacedRows:
    return PlacedRows(slot, start, (7,) * num_rows, torch.empty(num_rows))


def fill(cache: KeyValueCache, rows: PlacedRows, generator: torch.Generator) -> None:
    """What the sequence has cached so far."""
    if rows.start:
        views = cache.written(rows.slot, 0, rows.start)
        views[LAYER].copy_(torch.randn(views[LAYER].shape, generator=generator))


def expected(cache: KeyValueCache, rows: PlacedRows, query: torch.Tensor) -> torch.Tensor:
    """The rows' attention from what the cache holds, row by row."""
    keys, values = cache.slot(rows.slot)[LAYER]
    outputs = []
    for row in range(rows.num_rows):
        seen = rows.start + row + 1
        heads = []
        for head, group in itertools.product(range(KV_HEADS), range(GROUPS)):
            scores = keys[head, :seen] @ query[row, head, group] * SCALING
            heads.append(scores.softmax(0) @ values[head, :seen])
        outputs.append(torch.cat(heads))
    return torch.stack(outputs)


@st.composite
def steps(draw: st.DrawFn) -> list[PlacedRows]:
    slots = sorted(draw(st.sets(st.integers(0, 5), min_size=2)))
    return [placed(slot, draw(st.integers(0, 270)), draw(st.integers(1, 32))) for slot in slots]


@settings(deadline=None)
@given(steps(), st.integers(0, 1000), st.booleans())
def test_a_batch_attends_and_writes_as_its_sequences_do(
    rows: list[PlacedRows], seed: int, is_left_undefined: bool
) -> None:
    cache = new_cache()
    generator = torch.Generator().manual_seed(seed)
    if is_left_undefined:  # by failed sequences
        for slot in range(6):
            for view in cache.slot(slot):
                view.fill_(torch.nan)
    for each in rows:
        fill(cache, each, generator)
    num_rows = sum(each.num_rows for each in rows)
    query = torch.randn(num_rows, KV_HEADS, GROUPS, HEAD_DIM, generator=generator)
    key_value = torch.randn(num_rows, 2, KV_HEADS, HEAD_DIM, generator=generator)
    before = [cache.slot(each.slot)[LAYER][:, :, : each.end].clone() for each in rows]
    part = plan_batch(cache, rows, first_row=0, groups=GROUPS)
    found = attend(query, key_value, AttentionPlan((part,), torch.float32), LAYER, SCALING)
    first = 0
    for each, old in zip(rows, before, strict=True):
        own = slice(first, first + each.num_rows)
        first += each.num_rows
        now = cache.slot(each.slot)[LAYER][:, :, : each.end]
        assert torch.equal(now[:, :, : each.start], old[:, :, : each.start])
        assert torch.equal(now[:, :, each.start :], key_value[own].permute(1, 2, 0, 3))
        torch.testing.assert_close(found[own], expected(cache, each, query[own]))


def test_the_order_in_memory_of_what_a_kernel_gives_does_not_matter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some of a GPU's give heads side by side."""
    cache, rows = new_cache(), [placed(0, 3, 2), placed(1, 5, 3)]
    generator = torch.Generator().manual_seed(0)
    for each in rows:
        fill(cache, each, generator)
    query = torch.randn(5, KV_HEADS, GROUPS, HEAD_DIM, generator=generator)
    key_value = torch.randn(5, 2, KV_HEADS, HEAD_DIM, generator=generator)
    part = plan_batch(cache, rows, first_row=0, groups=GROUPS)
    usual = part.attend(query, key_value, LAYER, SCALING)

    def heads_side_by_side(*args: Any, **options: Any) -> torch.Tensor:
        output: torch.Tensor = scaled_dot_product_attention(*args, **options)
        return output.transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(
        "hippo.models.attention.batch.scaled_dot_product_attention", heads_side_by_side
    )
    assert torch.equal(part.attend(query, key_value, LAYER, SCALING), usual)


def slots_of(rows: list[PlacedRows]) -> list[list[int]]:
    return [[each.slot for each in group] for group in group_rows(rows)]


def test_alike_neighbours_are_one_batch() -> None:
    rows = [placed(slot, 180 + slot, 16) for slot in range(4)]
    assert slots_of(rows) == [[0, 1, 2, 3]]


def test_single_rows_are_batched_across_gaps() -> None:
    rows = [placed(slot, 150, 1) for slot in (0, 2, 3, 6)]
    assert slots_of(rows) == [[0, 2, 3, 6]]


def test_unequal_numbers_of_rows_are_computed_one_by_one() -> None:
    rows = [placed(0, 180, 16), placed(1, 200, 5), placed(3, 150, 12)]
    assert slots_of(rows) == [[0], [1], [3]]


@pytest.mark.parametrize(
    "other",
    [placed(30, 180, 16), placed(1, 8000, 16), placed(1, 180, 33), placed(1, 9000, 1)],
    ids=["far slot", "long context", "many rows", "long context, one row"],
)
def test_what_would_compute_much_in_vain_stays_apart(other: PlacedRows) -> None:
    rows = [placed(0, 180, 16), other]
    assert slots_of(rows) == [[0], [other.slot]]


def test_a_slot_is_cleared_once_in_a_while_and_never_what_it_holds() -> None:
    cache = new_cache(capacity=600)
    view = cache.slot(2)[LAYER]
    view.fill_(1.0)
    cache.zero_unwritten(2, 100, 130)
    assert bool((view[:, :, :100] == 1.0).all())
    assert bool((view[:, :, 100:256] == 0.0).all())
    view[:, :, 100:256] = 2.0  # later steps
    cache.zero_unwritten(2, 140, 256)
    assert bool((view[:, :, 100:256] == 2.0).all())
    cache.zero_unwritten(2, 250, 599)
    assert bool((view[:, :, 100:256] == 2.0).all())
    assert bool((view[:, :, 256:] == 0.0).all())
    cache.forget_slot(2)
    view.fill_(3.0)
    cache.zero_unwritten(2, 10, 20)
    view[:, :, :400] = 4.0  # steps that read nothing under a mask, and so cleared nothing
    cache.zero_unwritten(2, 400, 410)
    assert bool((view[:, :, :400] == 4.0).all()), "what the slot holds"
    assert bool((view[:, :, 400:512] == 0.0).all()) and bool((view[:, :, 512:] == 3.0).all())
    cache.forget_slot(2)
    cache.zero_unwritten(2, 10, 20)
    assert bool((view[:, :, 10:256] == 0.0).all())
