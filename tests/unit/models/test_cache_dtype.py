"""Which dtype keys and values are kept in."""

import pytest
import torch

from hippo.models.cache import cache_dtype

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("has_tiles", [True, False])
def test_on_a_gpu_it_is_the_models(
    dtype: torch.dtype, has_tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": has_tiles})
    assert cache_dtype(dtype, GPU) == dtype


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"amx_bf16": True}, torch.bfloat16),
        ({"amx_bf16": False, "avx512_bf16": True}, torch.float32),
        ({}, torch.float32),  # an ARM processor names others
    ],
)
def test_on_a_cpu_bfloat16_stays_where_it_is_multiplied_in_tiles(
    capabilities: dict[str, bool], expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert cache_dtype(torch.bfloat16, CPU) == expected
    assert cache_dtype(torch.float32, CPU) == torch.float32
    assert cache_dtype(torch.float16, CPU) == torch.float32


def test_without_a_word_from_torch_it_is_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert cache_dtype(torch.bfloat16, CPU) == torch.float32
