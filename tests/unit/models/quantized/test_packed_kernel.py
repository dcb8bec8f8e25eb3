"""The CUDA source gives the numbers of the plain weight, run thread by thread on this CPU."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hippo.models.quantized.packed import Kernels, are_right, source_of, tried_rows

HOST = Path(__file__).parents[3] / "support" / "devices" / "host_kernel.cpp"
_ON_HOST = ("multiply_tile", "rounded_pair", "rounded", "widened_half")  # in assembly for a GPU
_LAUNCHES = """
extern "C" void launch_multiply(
    int grid, const uint4* packed, const void* scales, const u16* zeros, const u32* pairs,
    const u16* bias, const u16* x, u16* product, int num_rows, int height, int width) {
  launch(grid, [=] {
    multiply(packed, scales, zeros, pairs, bias, x, product, num_rows, height, width);
  });
}
extern "C" void launch_unpack(
    int grid, const uint4* packed, const void* scales, const u16* zeros, const u32* pairs,
    u32* weight, int first_row, int count, int width) {
  launch(grid, [=] { unpack(packed, scales, zeros, pairs, weight, first_row, count, width); });
}
"""

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def _compiled(source: str, folder: Path) -> Any:
    for name in _ON_HOST:
        pattern = rf"__device__ __forceinline__ \w+ {name}\(.*?\n}}\n"
        source, count = re.subn(pattern, "", source, flags=re.DOTALL)
        assert count == 1
    settings, source = source.split("typedef unsigned int u32;")
    path = folder / "kernel.cpp"
    source = f"{settings}{HOST.read_text()}typedef unsigned int u32;{source}{_LAUNCHES}"
    path.write_text(source)
    library = folder / "kernel.so"
    options = ["-std=c++20", "-O1", "-w", "-fno-strict-aliasing", "-shared", "-fPIC", "-pthread"]
    subprocess.run(["g++", *options, "-o", str(library), str(path)], check=True)
    return ctypes.CDLL(str(library))


class _OnHost:
    """A kernel with torch's way to call it."""

    def __init__(self, launch: Any) -> None:
        self._launch = launch

    def __call__(self, *, grid: tuple[int, int, int], block: object, args: list[Any]) -> None:
        self._launch(grid[0], *map(_argument, args))


def _argument(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return ctypes.c_void_p(value.data_ptr() if value.numel() else None)


@pytest.mark.parametrize(
    ("bits", "has_zeros", "dtype", "shape", "has_bias"),
    [
        (4, True, torch.bfloat16, (2, 2), True),
        (4, False, torch.float16, (4, 2), False),
        (8, False, torch.bfloat16, (1, 4), True),
    ],
)
def test_the_kernels_give_the_numbers_of_the_plain_weight(
    bits: int,
    has_zeros: bool,
    dtype: torch.dtype,
    shape: tuple[int, int],
    has_bias: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = tried_rows(torch.device("cpu"), bits, has_zeros)
    if not has_bias:
        rows = replace(rows, bias=None)
    library = _compiled(source_of(bits, dtype, *shape, has_zeros=has_zeros), tmp_path)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    few = {shape: _OnHost(library.launch_multiply)}
    kernels = Kernels(few, _OnHost(library.launch_unpack))
    assert are_right(kernels, rows, dtype)
