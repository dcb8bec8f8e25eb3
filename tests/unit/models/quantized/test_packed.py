"""The kernel for few rows reads quantised weights; its source is also run on this CPU."""

import ctypes
import importlib
import logging
import re
import shutil
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from hippo.models.interface.checkpoint import find_checkpoint
from hippo.models.interface.plan import LoadPlan
from hippo.models.loading import quantization as quantized
from hippo.models.loading.quantization import find_quantization
from hippo.models.loading.resolve import import_transformers
from hippo.models.loading.weights import read_weights
from hippo.models.products.linear import is_plain
from hippo.models.quantized import packed
from hippo.models.quantized.forms import Packed
from hippo.models.quantized.packed import (
    SHAPES,
    Kernels,
    PackedLinear,
    are_right,
    make_kernels,
    make_packed,
    source_of,
    tried_rows,
)
from hippo.models.quantized.quantised_rows import QuantisedRows, quantised_rows
from tests.support.models.quantized import has_packages, write_quantized

needs_packages = pytest.mark.skipif(
    not has_packages(), reason="the group quantized is not installed"
)


@pytest.fixture(autouse=True)
def _gpu_of_132_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        properties = SimpleNamespace(multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def _written(folder: Path, form: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """The layers of a checkpoint, quantised as hippo loads it where there are kernels, and the
    weights that they stand for."""
    folder, plain = write_quantized(folder, "Qwen/Qwen2.5-VL-72B-Instruct", form)
    expected = {
        name: weight
        for path in plain.glob("*.safetensors")
        for name, weight in load_file(path).items()
    }
    plan = LoadPlan(str(folder), dtype="bfloat16")
    checkpoint = find_checkpoint(str(folder), progress=lambda stage, share: None)
    transformers = import_transformers()
    config = transformers.AutoConfig.from_pretrained(folder)
    with mock.patch.object(quantized, "can_pack", lambda *_of: True):
        found = find_quantization(plan, checkpoint, torch.device("cpu"))
    assert isinstance(found, Packed)
    model = read_weights(
        checkpoint,
        transformers.Qwen2_5_VLForConditionalGeneration,
        config,
        torch.bfloat16,
        device=torch.device("cpu"),
        form=found,
        shards=None,
        report=lambda share: None,
    )
    return model.model.language_model.layers, expected


@needs_packages
@pytest.mark.parametrize(
    "form", ["RedHatAI quantized.w4a16", "RedHatAI quantized.w8a8", "Qwen AWQ"]
)
def test_rows_of_published_integers_stand_for_the_plain_weights(form: str, tmp_path: Path) -> None:
    layers, expected = _written(tmp_path, form)
    for index, layer in enumerate(layers):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.down_proj"):
            module = layer.get_submodule(name)
            assert not is_plain(module)
            rows = quantised_rows(module)
            assert rows is not None and rows.shape == (module.out_features, module.in_features)
            assert rows.scales.dtype == (torch.float16 if rows.bits == 4 else torch.float32)
            found = rows.plain(torch.bfloat16)
            weight = expected[f"model.layers.{index}.{name}.weight"]
            assert_close(found, weight, rtol=1e-2, atol=1e-4)  # which is rounded to bfloat16


@needs_packages
@pytest.mark.parametrize("is_nested", [True, False])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_rows_of_bitsandbytes_stand_for_its_numbers(is_nested: bool, kind: str) -> None:
    functional: Any = importlib.import_module("bitsandbytes.functional")
    weight = torch.randn(48, 128)
    codes, state = functional.quantize_4bit(
        weight, blocksize=64, compress_statistics=is_nested, quant_type=kind
    )
    module = SimpleNamespace(weight=codes, bias=torch.randn(48))
    module.weight.quant_state = state
    rows = quantised_rows(module)
    assert rows is not None and rows.shape == (48, 128) and rows.bias is module.bias
    expected = functional.dequantize_4bit(codes, state)
    assert_close(rows.plain(torch.float32), expected, rtol=1e-3, atol=1e-5)  # scales in float16


@needs_packages
def test_rows_of_torchao_stand_for_its_numbers() -> None:
    torchao: Any = importlib.import_module("torchao.quantization")
    layer = torch.nn.Linear(128, 48)
    torchao.quantize_(layer, torchao.Int8WeightOnlyConfig(set_inductor_config=False))
    rows = quantised_rows(layer)
    assert rows is not None and rows.bits == 8
    weight: Any = layer.weight
    assert_close(rows.plain(torch.float32), weight.dequantize())


@needs_packages
@pytest.mark.parametrize("form", ["RedHatAI quantized.w4a16", "Qwen AWQ"])
def test_layers_without_products_beside_plain_ones_are_decompressed(
    form: str, tmp_path: Path
) -> None:
    (layer, *_), expected = _written(tmp_path, form)
    modules = [layer.mlp.gate_proj, torch.nn.Linear(128, 128, bias=False).bfloat16()]
    assert not is_plain(modules[0])
    with mock.patch.object(packed, "has_kernels", lambda device: True):
        assert make_packed(modules, torch.bfloat16) is None
    assert is_plain(modules[0])
    weight = expected["model.layers.0.mlp.gate_proj.weight"]
    assert_close(modules[0].weight.float(), weight, rtol=1e-2, atol=1e-4)


def test_modules_that_the_kernels_do_not_have_stay_with_their_package() -> None:
    assert quantised_rows(torch.nn.Linear(128, 48)) is None
    assert make_packed([torch.nn.Linear(128, 48)], torch.bfloat16) is None  # on a CPU
    module = torch.nn.Module()  # it has only buffers, as gptqmodel's
    module.register_buffer("qweight", torch.zeros(8, 8, dtype=torch.int32))
    assert make_packed([module], torch.bfloat16) is None


def _random_rows(
    bits: int, height: int, width: int, *, has_bias: bool, has_zeros: bool
) -> QuantisedRows:
    with torch.device("cuda"):
        scales = torch.rand(height, width // 64).half() if bits == 4 else torch.rand(height)
        zeros = torch.randint(16, (height, width // 64), dtype=torch.uint8)
        return QuantisedRows(
            torch.randint(256, (height, width * bits // 8), dtype=torch.uint8),
            scales + 0.1,
            torch.randn(16).sort().values if bits == 4 else None,
            torch.randn(height) if has_bias else None,
            zeros if has_zeros else None,
        )


@pytest.mark.parametrize("count", [1, 8, 9, 32, 33, 100, 192, 193, 300])
def test_rows_are_multiplied_in_parts_or_by_the_unpacked_weight(count: int) -> None:
    weight = torch.randn(96, 64)
    num_rows: list[int] = []

    def multiply(most: int, *, args: list[Any], **_options: Any) -> None:
        """The kernel for up to 8, 16 or 32 rows."""
        x, product, given = args[5:8]
        assert given == x.shape[0] <= most and product.is_contiguous()
        num_rows.append(given)
        product.copy_(x @ weight.T)

    def unpack(*, args: list[Any], **_options: Any) -> None:
        first = 16 * args[5]
        args[4].copy_(weight[first : first + args[4].shape[0]])

    few = {shape: partial(multiply, 8 * shape[0]) for shape in SHAPES}
    rows = QuantisedRows(torch.zeros(48, 64, dtype=torch.uint8), torch.ones(48), None, None)
    product = PackedLinear([rows, rows], torch.float32, Kernels(few, unpack))
    x = torch.randn(count, 64)
    assert_close(product(x), x @ weight.T)
    assert sum(num_rows) == (count if count <= 192 else 0)


@pytest.mark.parametrize("wrong", [None, *SHAPES, "unpack"])
def test_kernels_that_give_other_numbers_than_the_weight_are_not_used(
    wrong: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rows = tried_rows(torch.device("cpu"), 4, True)
    weight = rows.plain(torch.bfloat16)

    def multiply(shape: tuple[int, int], *, args: list[Any], **_options: Any) -> None:
        x, product = args[5:7]
        expected = x.float() @ weight.T + args[4].float()
        product.copy_(expected.roll(1, 1) if wrong == shape else expected)

    def unpack(*, args: list[Any], **_options: Any) -> None:
        args[4].copy_(weight * 1.05 if wrong == "unpack" else weight)

    few = {shape: partial(multiply, shape) for shape in SHAPES}
    with caplog.at_level(logging.ERROR):
        assert are_right(Kernels(few, unpack), rows, torch.bfloat16) == (wrong is None)
    assert ("report it with the GPU's name" in caplog.text) == (wrong is not None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("bits", "has_zeros"), [(4, False), (4, True), (8, False)])
@pytest.mark.parametrize(
    ("heights", "width", "has_bias"),
    [((32,), 64, False), ((64, 16, 16), 1088, True), ((17_408, 17_408), 1024, False)],
)
def test_products_are_those_of_the_plain_weight(
    bits: int,
    has_zeros: bool,
    dtype: torch.dtype,
    heights: tuple[int, ...],
    width: int,
    has_bias: bool,
) -> None:
    torch.manual_seed(0)
    parts = [
        _random_rows(bits, height, width, has_bias=has_bias, has_zeros=has_zeros)
        for height in heights
    ]
    kernels = make_kernels(torch.device("cuda", 0), bits, dtype, has_zeros)
    assert kernels is not None
    if bits == 4:  # parts of a product have the same values
        parts = [replace(part, values=parts[0].values) for part in parts]
    product = PackedLinear(parts, dtype, kernels)
    weight = torch.cat([part.plain(dtype) for part in parts])
    x = (torch.randn(300, width, device="cuda") / 64).to(dtype)
    expected = x.float() @ weight.T
    if has_bias:
        expected += torch.cat([part.bias for part in parts if part.bias is not None]).to(dtype)
    one_by_one = torch.cat([product(row[None]) for row in x[:192]])
    eps = torch.finfo(dtype).eps
    for count in (1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 100, 192, 300):
        found = product(x[:count])
        assert found.dtype == dtype
        error = float((found.float() - expected[:count]).norm() / expected[:count].norm())
        assert error < eps, f"{count} rows"
        if count <= 192:
            assert torch.equal(found, one_by_one[:count]), f"{count} rows"


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


def _call(launch: Any, *, grid: tuple[int, int, int], block: object, args: list[Any]) -> None:
    """Calls a kernel on the host in torch's way."""

    def given(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return ctypes.c_void_p(value.data_ptr() if value.numel() else None)

    launch(grid[0], *map(given, args))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
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
) -> None:
    rows = tried_rows(torch.device("cpu"), bits, has_zeros)
    if not has_bias:
        rows = replace(rows, bias=None)
    library = _compiled(source_of(bits, dtype, *shape, has_zeros=has_zeros), tmp_path)
    few = {shape: partial(_call, library.launch_multiply)}
    assert are_right(Kernels(few, partial(_call, library.launch_unpack)), rows, dtype)
