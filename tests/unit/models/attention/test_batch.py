"""Attention of several slots' rows in one call, held against plain arithmetic."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
    first, count = draw(st.integers(0, 4)), draw(st.integers(2, 6))
    slots = range(first, min(first + count, 6))
    return [placed(slot, draw(st.integers(0, 270)), 1) for slot in slots]


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
    part = plan_batch(cache, rows, first_row=0)
    found = attend(query, key_value, AttentionPlan((part,), torch.float32), LAYER, SCALING)
    first = 0
    for each, old in zip(rows, before, strict=True):
        own = slice(first, first + each.num_rows)
        first += each.num_rows
        now = cache.slot(each.slot)[LAYER][:, :, : each.end]
        assert torch.equal(now[:, :, : each.start], old[:, :, : each.start])
        assert torch.equal(now[:, :, each.start :], key_value[own].permute(1, 2, 0, 3))
        torch.testing.assert_close(found[own], expected(cache, each, query[own]))


def slots_of(rows: list[PlacedRows]) -> list[list[int]]:
    return [[each.slot for each in group] for group in group_rows(rows)]


def test_alike_single_rows_of_neighbours_are_one_batch() -> None:
    rows = [placed(slot, 180 + slot, 1) for slot in range(4)]
    assert slots_of(rows) == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    "other",
    [placed(2, 180, 1), placed(1, 8000, 1), placed(1, 180, 2)],
    ids=["no neighbour", "long context", "two rows"],
)
def test_what_would_compute_much_in_vain_stays_apart(other: PlacedRows) -> None:
    assert slots_of([placed(0, 180, 1), other]) == [[0], [other.slot]]
