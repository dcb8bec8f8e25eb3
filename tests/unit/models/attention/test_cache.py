"""The cache's dtype and memory, and how the rows of a forward are laid out."""

import logging
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hippo.models.attention import cache
from hippo.models.attention.cache import CacheShape, KeyValueCache, cache_dtype
from hippo.models.attention.ranges import find_flash
from hippo.models.attention.rows import PlacedRows, lay_out
from hippo.models.interface.plan import LoadPlan
from hippo.models.products.linear import make_linear, padded_rows
from hippo.models.runners.captured import make_fixed_runner
from tests.support.devices.pretend_cuda import CUDA, pretend_cuda

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("capabilities", "packs", "expected"),
    [
        ({"amx_bf16": True}, True, torch.bfloat16),
        ({"amx_bf16": True}, False, torch.float32),  # oneDNN is told not to use it
        ({"amx_bf16": False, "avx512_bf16": True}, True, torch.float32),
        ({}, True, torch.float32),  # an ARM processor names others
    ],
)
def test_on_a_cpu_bfloat16_stays_where_it_is_multiplied_in_tiles(
    capabilities: dict[str, bool],
    packs: bool,
    expected: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache, "packing", lambda _: make_linear if packs else None)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert cache_dtype(torch.bfloat16, CPU) == expected
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert cache_dtype(dtype, GPU) == dtype
    assert cache_dtype(torch.float32, CPU) == torch.float32
    assert cache_dtype(torch.float16, CPU) == torch.float32


def test_a_cache_on_a_cpu_is_resident_only_where_it_is_written() -> None:
    def resident() -> int:
        return int(psutil.Process().memory_info().rss)

    shape = CacheShape(num_layers=4, num_slots=8, num_kv_heads=2, capacity=16384, head_dim=64)
    before = resident()
    held = KeyValueCache(shape, dtype=torch.float32, device=torch.device("cpu"))
    assert shape.num_bytes(torch.float32) == 512 << 20
    assert resident() - before < 64 << 20
    assert not held.seen(7, 16384)[1][3].any()


def test_a_slot_is_cleared_once_in_a_while_and_never_what_it_holds() -> None:
    shape = CacheShape(num_layers=2, num_slots=3, num_kv_heads=2, capacity=600, head_dim=8)
    held = KeyValueCache(shape, dtype=torch.float32, device=CPU)
    view = held.slot(2)[1]
    view.fill_(1.0)
    held.zero_unwritten(2, 100, 130)
    assert bool((view[:, :, :100] == 1.0).all())
    assert bool((view[:, :, 100:256] == 0.0).all())
    view[:, :, 100:256] = 2.0  # later steps
    held.zero_unwritten(2, 140, 256)
    assert bool((view[:, :, 100:256] == 2.0).all())
    held.zero_unwritten(2, 250, 599)
    assert bool((view[:, :, 100:256] == 2.0).all())
    assert bool((view[:, :, 256:] == 0.0).all())
    held.forget_slot(2)
    view.fill_(3.0)
    held.zero_unwritten(2, 10, 20)
    view[:, :, :400] = 4.0  # steps that read nothing under a mask, and so cleared nothing
    held.zero_unwritten(2, 400, 410)
    assert bool((view[:, :, :400] == 4.0).all()), "what the slot holds"
    assert bool((view[:, :, 400:512] == 0.0).all()) and bool((view[:, :, 512:] == 3.0).all())


def placed(slot: int, num_rows: int) -> PlacedRows:
    """Rows whose ids and factors tell slot and row."""
    ids = tuple(100 * slot + row for row in range(num_rows))
    return PlacedRows(slot, 0, ids, torch.tensor(ids)[:, None])


@st.composite
def forwards(draw: st.DrawFn) -> list[PlacedRows]:
    slots = draw(st.lists(st.integers(0, 20), min_size=1, max_size=8, unique=True))
    return [placed(slot, draw(st.integers(1, 40))) for slot in slots]


@given(forwards(), st.sampled_from([padded_rows, int]))
def test_all_rows_run_by_slot_and_those_that_are_wanted_come_back_as_asked(
    asked: list[PlacedRows], padded: type[int]
) -> None:
    layout = lay_out(asked, padded=padded)
    ids = list(layout.token_ids)
    num_rows = len(ids) - layout.num_padding
    assert ids[:num_rows] == sorted(id_ for rows in asked for id_ in rows.token_ids)
    assert len(ids) == padded(num_rows)

    expected = [id_ for rows in asked for id_ in rows.token_ids]
    taken = ids if layout.wanted is None else [ids[row] for row in layout.wanted]
    assert taken[: layout.num_wanted] == expected
    assert len(taken) == padded(layout.num_wanted)

    factors = layout.rotary()[:, 0].tolist()
    assert factors == ids[:num_rows] + [ids[num_rows - 1]] * layout.num_padding


def test_rows_in_order_of_slots_come_back_without_a_copy() -> None:
    assert lay_out([placed(1, 2), placed(3, 1)], padded=int).wanted is None
    assert lay_out([placed(3, 1), placed(1, 2)], padded=int).wanted is not None


@pytest.mark.parametrize(
    ("dtype", "head_dim", "reason"),
    [
        (torch.float32, 8, "bfloat16 or float16, not float32"),
        (torch.bfloat16, 12, "multiple of 8 numbers, not of 12"),
        (torch.bfloat16, 8, "cuda:0 does not run it with heads of 8 numbers"),
    ],
)
def test_the_warning_says_why_graphs_are_off(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    dtype: torch.dtype,
    head_dim: int,
    reason: str,
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda _: False)
    with pretend_cuda():
        shape = CacheShape(num_layers=1, num_slots=1, num_kv_heads=1, capacity=8, head_dim=head_dim)
        held = KeyValueCache(shape, dtype=dtype, device=CUDA)
        found = find_flash(held, 7)
    nothing: Any = None
    caplog.set_level(logging.INFO)
    for choice, level in (("on", logging.WARNING), ("auto", logging.INFO)):
        caplog.clear()
        plan = LoadPlan("m", device="cuda", cuda_graphs=choice)
        assert make_fixed_runner(plan, nothing, held, nothing, found) is None
        (record,) = caplog.records
        assert record.levelno == level
        assert reason in record.getMessage() and "CUDA graphs are off" in record.getMessage()
