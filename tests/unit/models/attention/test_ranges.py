"""Attention of several sequences in one call, held against plain arithmetic.

The operator of a GPU is replaced by tests/support/devices/flash_operator.py, and its kernel is held
against plain arithmetic where there is a GPU.
"""

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hippo.models.attention import flash, ranges
from hippo.models.attention.batch import group_rows, plan_batch
from hippo.models.attention.cache import CacheShape, KeyValueCache
from hippo.models.attention.parts import AttentionPlan, attend, plan_sequence
from hippo.models.attention.ranges import find_flash, plan_ranges
from hippo.models.attention.rows import PlacedRows
from tests.support.devices.flash_operator import flash_operator

LAYER, SCALING, HEAD_DIM, CAPACITY = 1, 0.25, 8, 320
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(scope="module", autouse=True)
def operator() -> Iterator[None]:
    with flash_operator():
        yield


def new_cache(
    dtype: torch.dtype = torch.float32, *, device: str = "cpu", **changes: int
) -> KeyValueCache:
    sizes: dict[str, Any] = {
        "num_kv_heads": 2,
        "capacity": CAPACITY,
        "head_dim": HEAD_DIM,
    } | changes
    shape = CacheShape(num_layers=2, num_slots=6, num_spare=5, **sizes)
    return KeyValueCache(shape, dtype=dtype, device=torch.device(device))


def placed(slot: int, start: int, num_rows: int) -> PlacedRows:
    return PlacedRows(slot, start, (7,) * num_rows, torch.empty(num_rows))


class RandomRows:
    """What sequences have cached, and random rows to attend."""

    def __init__(
        self, cache: KeyValueCache, rows: list[PlacedRows], groups: int, seed: int
    ) -> None:
        self.cache, self.rows = cache, rows
        shape, num_rows = cache.shape, sum(each.num_rows for each in rows)
        generator = torch.Generator().manual_seed(seed)

        def draw(*size: int) -> torch.Tensor:
            numbers = torch.randn(*size, shape.head_dim, generator=generator)
            return numbers.to(cache.device, cache.dtype)

        for slot in range(shape.num_slots):
            for view in cache.slot(slot):
                view.fill_(torch.nan)  # what failed sequences left
        for each in rows:
            if each.start:
                written = cache.written(each.slot, 0, each.start)[LAYER]
                written.copy_(draw(2, shape.num_kv_heads, each.start))
        self.before = cache._data.clone()
        self.query = draw(num_rows, shape.num_kv_heads, groups)
        self.key_value = draw(num_rows, 2, shape.num_kv_heads)

    def attend(self, part: Any, **options: Any) -> torch.Tensor:
        """All rows' attention by the part; checks that their keys and values are cached behind what
        was there."""
        plan = AttentionPlan((part,), self.cache.dtype, **options)
        found = attend(self.query, self.key_value, plan, LAYER, SCALING)
        first = 0
        for each in self.rows:
            now = self.cache.slot(each.slot)[LAYER][:, :, : each.end]
            own = self.key_value[first : first + each.num_rows].permute(1, 2, 0, 3)
            earlier = self.before[LAYER, each.slot, :, :, : each.start]
            assert torch.equal(now, torch.cat((earlier, own), 2))
            first += each.num_rows
        return found

    def expected(self) -> torch.Tensor:
        """All rows' attention, row by row and in float64."""
        outputs, queries = [], iter(self.query.double())
        for each in self.rows:
            keys, values = self.cache.slot(each.slot)[LAYER].double()
            for seen in range(each.start + 1, each.end + 1):
                scores = next(queries) @ keys[:, :seen].mT * SCALING
                outputs.append((scores.softmax(-1) @ values[:, :seen]).flatten())
        return torch.stack(outputs)


@st.composite
def steps(draw: st.DrawFn) -> list[PlacedRows]:
    slots = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True))
    counts = st.just(draw(st.integers(1, 32))) if draw(st.booleans()) else st.integers(1, 32)
    return [placed(slot, draw(st.integers(1, CAPACITY - 32)), draw(counts)) for slot in slots]


@settings(deadline=None, max_examples=60)
@given(
    steps(),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 3, 7]),
    st.sampled_from(list(TOLERANCES)),
    st.integers(0, 1000),
)
def test_sequences_attend_as_each_of_their_rows_does(
    rows: list[PlacedRows], num_kv_heads: int, groups: int, dtype: torch.dtype, seed: int
) -> None:
    step = RandomRows(new_cache(dtype, num_kv_heads=num_kv_heads), rows, groups, seed)
    found = step.attend(plan_ranges(step.cache, rows, first_row=0))
    torch.testing.assert_close(
        found.double(), step.expected(), rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype]
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_prefix_and_block_are_averaged_and_rounded_once(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A difference and a weight in 16 bits would each cost a further rounding."""
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    call = flash.attend_ranges

    def recorded(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        output, sums = call(*args, **kwargs)
        parts.append((output.clone(), sums))
        return output, sums

    monkeypatch.setattr(ranges, "attend_ranges", recorded)
    num_rows, num_kv_heads, groups = 16, 2, 3
    rows = [placed(slot, 12, num_rows) for slot in (4, 1)]
    step = RandomRows(new_cache(dtype, num_kv_heads=num_kv_heads), rows, groups, 0)
    found = step.attend(plan_ranges(step.cache, rows, first_row=0))
    (prefix, prefix_sums), (block, block_sums) = parts
    by_sequence = (len(rows), num_kv_heads, num_rows, groups)
    prefix = prefix.view(*by_sequence, HEAD_DIM).transpose(1, 2).reshape(block.shape)
    prefix_sums = prefix_sums.T.view(by_sequence).transpose(1, 2).reshape(block_sums.T.shape)
    weight = torch.sigmoid(prefix_sums.double() - block_sums.T.double()).unsqueeze(-1)
    expected = (weight * prefix.double() + (1 - weight) * block.double()).to(dtype)
    # Where the average lies between two numbers, float32 may round to the other one than float64.
    assert (found.view(expected.shape) == expected).double().mean() > 0.999


@settings(deadline=None)
@given(st.sampled_from([0, 1, 30, 240]), st.integers(1, 70), st.integers(0, 1000), st.booleans())
def test_a_sequence_attends_without_a_mask(
    start: int, num_rows: int, seed: int, wants_last_row: bool
) -> None:
    rows = [placed(2, start, num_rows)]
    step = RandomRows(new_cache(), rows, 3, seed)
    part = plan_sequence(
        step.cache, 2, first_row=0, start=start, num_rows=num_rows, groups=3, is_flash=True
    )
    assert part.mask is None
    found = step.attend(part, wants_last_row=wants_last_row)
    wanted = step.expected().float()
    torch.testing.assert_close(found, wanted[-1:] if wants_last_row else wanted)


def test_keys_are_read_once_for_all_rows_and_heads_that_share_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel does so for one row a sequence only, however many heads."""
    calls: list[tuple[Any, ...]] = []
    operator = flash._operator

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return operator(*args, **kwargs)

    monkeypatch.setattr(flash, "_operator", call)
    rows = [placed(0, 250, 4), placed(3, 9, 2)]
    step = RandomRows(new_cache(), rows, 7, 0)
    step.attend(plan_ranges(step.cache, rows, first_row=0))
    prefix, block = calls
    assert prefix[0].shape == (2, 2 * 4 * 7, HEAD_DIM) and prefix[5:7] == (1, 250)
    assert prefix[1].data_ptr() == step.cache._data[LAYER].data_ptr(), "no copy"
    assert block[0].shape == (6, 2 * 7, HEAD_DIM) and block[5:7] == (4, 4)


def test_a_cache_counts_its_rows_as_the_operator_does() -> None:
    cache = new_cache(num_kv_heads=3)
    for layer, slot, head, place in itertools.product((0, 1), (0, 5), (0, 2), (0, 7, CAPACITY)):
        stored = cache._data[layer, slot, :, head, place]
        row = cache.rows[layer][cache.row_of(slot, place), :, head]
        assert row.data_ptr() == stored.data_ptr() and row.stride() == stored.stride()


def test_a_kernel_that_gives_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ranges, "why_no_flash", lambda *_: None)
    assert find_flash(new_cache(torch.bfloat16), 7).has_ranges and not caplog.records
    operator = flash._operator

    def without_sums(*args: Any, **kwargs: Any) -> Any:
        output, sums, *others = operator(*args, **kwargs)
        return output, torch.zeros_like(sums), *others

    def not_there(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no kernel image is available\nfor this device")

    for instead, reason in (
        (without_sums, "a result differs by"),
        (not_there, "no kernel image is available"),
    ):
        caplog.clear()
        monkeypatch.setattr(flash, "_operator", instead)
        with caplog.at_level(logging.WARNING):
            found = find_flash(new_cache(torch.bfloat16), 7)
        assert found.has_flash and not found.has_ranges and reason in found.reason
        (record,) = caplog.records
        assert reason in record.getMessage() and "\n" not in record.getMessage()


@st.composite
def single_rows(draw: st.DrawFn) -> list[PlacedRows]:
    first, count = draw(st.integers(0, 4)), draw(st.integers(2, 6))
    slots = range(first, min(first + count, 6))
    return [placed(slot, draw(st.integers(0, 270)), 1) for slot in slots]


@settings(deadline=None)
@given(single_rows(), st.integers(0, 1000))
def test_a_batch_attends_and_writes_as_its_sequences_do(rows: list[PlacedRows], seed: int) -> None:
    step = RandomRows(new_cache(), rows, 3, seed)
    found = step.attend(plan_batch(step.cache, rows, first_row=0))
    torch.testing.assert_close(found, step.expected().float())


@pytest.mark.parametrize(
    ("others", "slots"),
    [
        ([placed(slot, 180 + slot, 1) for slot in (1, 2, 3)], [[0, 1, 2, 3]]),
        ([placed(2, 180, 1)], [[0], [2]]),
        ([placed(1, 8000, 1)], [[0], [1]]),
        ([placed(1, 180, 2)], [[0], [1]]),
    ],
    ids=["alike", "no neighbour", "long context", "two rows"],
)
def test_only_alike_single_rows_of_neighbours_are_one_batch(
    others: list[PlacedRows], slots: list[list[int]]
) -> None:
    groups = group_rows([placed(0, 180, 1), *others])
    assert [[each.slot for each in group] for group in groups] == slots


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("num_rows", [1, 9, 33])
def test_a_gpus_kernel_sees_what_plain_arithmetic_sees(num_rows: int, head_dim: int) -> None:
    sizes = {"num_kv_heads": 4, "capacity": 5000, "head_dim": head_dim}
    cache = new_cache(torch.bfloat16, device="cuda:0", **sizes)
    assert find_flash(cache, 7).has_ranges
    rows = [placed(4, 4900, num_rows), placed(1, 3, num_rows), placed(5, 700, num_rows)]
    step = RandomRows(cache, rows, 7, 0)
    found = step.attend(plan_ranges(cache, rows, first_row=0))
    torch.testing.assert_close(found.double(), step.expected(), rtol=2e-2, atol=2e-2)
