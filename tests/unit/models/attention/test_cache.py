"""The cache's dtype and memory."""

import psutil
import pytest
import torch

from hippo.models.attention import cache
from hippo.models.attention.cache import CacheShape, KeyValueCache, cache_dtype
from hippo.models.products.linear import make_linear

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("has_tiles", [True, False])
def test_on_a_gpu_it_is_the_models(
    dtype: torch.dtype, has_tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": has_tiles})
    assert cache_dtype(dtype, GPU) == dtype


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
