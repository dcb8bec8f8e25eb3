"""Which forms of quantised checkpoints are served, and what is said of the others."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from hippo.base.config import SettingsError
from hippo.catalog.public_models import PUBLIC_CONFIGS
from hippo.catalog.shapes import packed_bits, shape_of, stays_quantised
from hippo.catalog.sizes import GIB
from hippo.errors import ModelLoadError
from hippo.models.interface.checkpoint import Checkpoint, find_checkpoint
from hippo.models.interface.plan import LoadPlan
from hippo.models.loading import quantization as quantized
from hippo.models.loading.placement import dtype_of
from hippo.models.loading.quantization import find_quantization, warn_of_rounding
from hippo.models.quantized.forms import Packed, WeightForm
from hippo.parallel.source import ParallelSource
from services.target.config import TargetSettings
from tests.support.models.hub_forms import write_hub_form
from tests.support.models.quantized import (
    AWQ_CONFIG,
    FORMS,
    GPTQ_CONFIG,
    add_config,
    bitsandbytes_config,
    has_packages,
    write_quantized,
)

NAME = "Qwen/Qwen2.5-VL-72B-Instruct"
FP8_ROWS, INT4 = FORMS["RedHatAI FP8-dynamic"][1], FORMS["RedHatAI quantized.w4a16"][1]
OUTLIERS = bitsandbytes_config(is_4bit=False)
ONE_SCALE = {
    "quant_method": "torchao",
    "quant_type": {"default": {"_type": "Float8DynamicActivationFloat8WeightConfig",
                               "_data": {"granularity": "PerTensor"}}},
}  # fmt: skip
ALL_PACKAGES = {
    "bitsandbytes", "compressed_tensors", "gptqmodel", "kernels", "optimum", "torchao"
}  # fmt: skip


def checkpoint(config: dict[str, Any] | None, **sizes: int) -> Checkpoint:
    public = dict(PUBLIC_CONFIGS[NAME])
    if config is not None:
        public["quantization_config"] = config
    counts = {"num_floats": 1000, "num_packed_bytes": 500} | sizes
    return Checkpoint(NAME, Path("nowhere"), public, **counts)


def find(
    config: dict[str, Any] | None,
    *,
    device: str = "cpu",
    capability: tuple[int, int] = (9, 0),
    packages: set[str] = ALL_PACKAGES,
    load_kernel: Callable[[], None] = lambda: None,
    **changes: Any,
) -> WeightForm:
    with (
        mock.patch.object(quantized, "is_installed", packages.__contains__),
        mock.patch.object(torch.cuda, "get_device_capability", lambda device: capability),
        mock.patch(
            "transformers.integrations.finegrained_fp8.load_finegrained_fp8_kernel", load_kernel
        ),
    ):
        plan = LoadPlan(NAME, device=device, **changes)
        found = find_quantization(plan, checkpoint(config), torch.device(device))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        (AWQ_CONFIG | {"version": "gemv"}, {}, "in the form 'gemv'; supported is 'gemm': use"),
        (AWQ_CONFIG | {"bits": 3}, {}, "not in 4 bits with zero points"),
        (AWQ_CONFIG | {"zero_point": False}, {}, "not in 4 bits with zero points"),
        (AWQ_CONFIG | {"group_size": 96}, {}, "groups of 96 columns do not divide"),
        (GPTQ_CONFIG, {}, "kernels need a GPU: use --device cuda"),
        (GPTQ_CONFIG, {"device": "cuda", "packages": set()}, "pip install gptqmodel optimum"),
        (INT4, {"packages": set()}, "pip install compressed-tensors"),
        (FORMS["unsloth bnb-4bit"][1], {"packages": set()}, "pip install bitsandbytes"),
        (FORMS["Qwen FP8"][1], {"device": "cuda", "packages": set()}, "pip install kernels"),
        (
            FORMS["Qwen FP8"][1],
            {"device": "cuda", "load_kernel": mock.Mock(side_effect=ImportError("no build"))},
            "kernels cannot be loaded.*no build",
        ),
        ({"quant_method": "torchao", "quant_type": {}}, {"packages": set()}, "install torchao"),
        ({"quant_method": "aqlm"}, {}, "'aqlm', which is not supported; supported: awq, bits"),
        ({"bits": 4}, {}, "an unnamed method"),
        (INT4, {"quantization": "int8"}, "quantised already.*leave --quantization out"),
        (INT4, {"tensor_parallel": 2}, "leave --tensor-parallel out"),
        (INT4 | {"config_groups": {}}, {}, "with 0 groups of layers"),
        (INT4 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, {}, "sparse weights"),
        (OUTLIERS, {}, "depend on the other tokens of a forward.* use another form"),
        (ONE_SCALE, {}, "depend on the other tokens of a forward.* use another form"),
        (None, {"quantization": "nf4", "packages": set()}, "pip install bitsandbytes"),
        (None, {"quantization": "int8", "packages": set()}, "pip install torchao"),
    ],
)
def test_what_cannot_run_is_refused_in_one_sentence(
    config: dict[str, Any] | None, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelLoadError, match=said) as caught:
        find(config, **options)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("config", "options", "name", "is_kept"),
    [
        (AWQ_CONFIG, {"packages": set()}, "awq", False),
        (AWQ_CONFIG, {"device": "cuda"}, "awq", False),  # no CUDA device here to compile for
        (GPTQ_CONFIG, {"device": "cuda"}, "gptq", True),
        (FORMS["Qwen FP8"][1], {"device": "cuda"}, "fp8", True),
        (FORMS["Qwen FP8"][1], {"device": "cuda", "capability": (8, 0)}, "fp8", False),
        (FORMS["Qwen FP8"][1], {}, "fp8", False),
        (FP8_ROWS, {"device": "cuda"}, "compressed-tensors float8", True),
        (FP8_ROWS, {"device": "cuda", "capability": (8, 0)}, "compressed-tensors float8", False),
        (INT4, {"device": "cuda"}, "compressed-tensors int4", False),
        (FORMS["unsloth bnb-4bit"][1], {}, "bitsandbytes nf4", True),
        (OUTLIERS | {"llm_int8_threshold": 0.0}, {}, "LLM.int8() without outliers", True),
        (None, {"quantization": "nf4"}, "nf4", True),
    ],
)
def test_layers_stay_quantised_where_there_are_kernels(
    config: dict[str, Any] | None, options: dict[str, Any], name: str, is_kept: bool
) -> None:
    found = find(config, **options)
    assert (found.name, found.is_kept) == (name, is_kept)


def _can_pack(_device: torch.device, _bits: int, dtype: torch.dtype, _has_zeros: bool) -> bool:
    return dtype.itemsize == 2


@pytest.mark.parametrize(
    ("change", "is_kept"),
    [
        ({}, True),
        ({"group_size": 64}, True),
        ({"strategy": "channel", "group_size": None}, True),
        ({"strategy": "channel", "group_size": -1}, True),
        ({"actorder": "static"}, True),
        ({"actorder": "group"}, False),  # columns in an order of their own
        ({"group_size": 32}, False),
        ({"symmetric": False}, False),  # zero points
        ({"num_bits": 8}, False),
        *(({"bits": 4, "group_size": size}, size != 32) for size in (128, 64, -1, 32)),  # AWQ
    ],
)
def test_integers_stay_where_hippos_kernels_multiply_them(
    change: dict[str, Any], is_kept: bool
) -> None:
    config: dict[str, Any] = AWQ_CONFIG | change
    if "bits" not in change:
        config = copy.deepcopy(INT4)
        config["config_groups"]["group_0"]["weights"] |= change
    with mock.patch.object(quantized, "can_pack", _can_pack):
        found = find(config, device="cuda", dtype="bfloat16")
        assert found.is_kept == isinstance(found, Packed) == is_kept
        assert not find(config, device="cuda", dtype="float32").is_kept
        if "bits" not in change:
            config = {**config, "quantization_status": "frozen"}
            assert not find(config, device="cuda", dtype="bfloat16").is_kept
            config["quantization_status"] = "compressed"
            assert packed_bits(checkpoint(config).config) == (4.25 if is_kept else None)
    assert stays_quantised(checkpoint(config).config) == is_kept


def test_with_hippos_kernels_rounding_does_not_depend_on_the_number_of_rows() -> None:
    with mock.patch.object(quantized, "can_pack", _can_pack):
        for quantization in ("nf4", "int8"):
            found = find(None, device="cuda", dtype="bfloat16", quantization=quantization)
            assert isinstance(found, Packed)
            assert not found.rounds_by_rows and not found.dtypes


@pytest.mark.parametrize(
    ("config", "options", "is_refused"),
    [
        (FP8_ROWS, {"capability": (8, 9)}, True),
        (FP8_ROWS, {"capability": (9, 0)}, False),
        (FP8_ROWS, {"capability": (10, 0)}, True),
        (None, {"quantization": "int8"}, True),
    ],
)
def test_some_kernels_of_a_gpu_do_not_multiply_in_float16(
    config: dict[str, Any] | None, options: dict[str, Any], is_refused: bool
) -> None:
    found, device = find(config, device="cuda", **options), torch.device("cuda", 0)
    half = checkpoint(config)
    half = replace(half, config={**half.config, "dtype": "float16"})
    auto = torch.bfloat16 if is_refused else torch.float16
    assert dtype_of(LoadPlan(NAME, dtype="auto"), half, device, found) == auto
    said = "overflow in float16 here: use --dtype bfloat16"
    with pytest.raises(ModelLoadError, match=said) if is_refused else nullcontext():
        assert dtype_of(LoadPlan(NAME, dtype="float16"), half, device, found) == torch.float16
    assert not find(None, quantization="int8").dtypes


@pytest.mark.parametrize(
    ("options", "dtype", "is_told"),
    [
        ({"device": "cuda"}, torch.bfloat16, True),
        ({"device": "cuda"}, torch.float32, False),
        ({"device": "cuda", "exact_rows": 8}, torch.bfloat16, False),
        ({}, torch.bfloat16, False),
    ],
)
def test_kernels_that_round_by_the_number_of_rows_are_told(
    options: dict[str, Any], dtype: torch.dtype, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    found = find(None, quantization="nf4", **options)
    plan = LoadPlan(NAME, exact_rows=options.get("exact_rows"))
    warn_of_rounding(plan, checkpoint(None), found, dtype)
    assert ("--deterministic avoids it" in caplog.text) == is_told


def test_a_checkpoints_own_compute_dtype_is_not_that_of_other_rows() -> None:
    layer: Any = torch.nn.Linear(2, 2)
    layer.compute_type_is_set, layer.compute_dtype = True, torch.bfloat16
    WeightForm(name="nf4").prepare_modules(layer, torch.float32)
    assert layer.compute_dtype == torch.float32


def test_weights_take_the_bytes_of_their_form() -> None:
    shape = shape_of(NAME, PUBLIC_CONFIGS[NAME])

    def size(config: dict[str, Any] | None, **options: Any) -> int:
        bits = find(config, **options).layer_bits(checkpoint(config), shape, 2)
        return replace(shape, layer_bits=bits).weight_bytes()

    assert size(GPTQ_CONFIG, device="cuda") == 2 * 1000 + 500  # as stored
    assert size(INT4) == shape.weight_bytes()  # dequantised
    assert 39 < size(None, quantization="nf4") / GIB < 41
    assert 70 < size(None, quantization="int8") / GIB < 72
    packed, half = Packed(name="awq", settings={}, bits=4.25), shape.num_parameters
    assert packed.layer_bits(checkpoint(None), shape, 2) == 4.25
    # Half of the weights of the layers were left in 16 bits.
    assert packed.layer_bits(checkpoint(None, num_floats=half), shape, 2) > 4.25


@pytest.mark.skipif(not has_packages(), reason="compressed-tensors is not installed")
def test_stored_bytes_are_those_of_the_files(tmp_path: Path) -> None:
    folder, _ = write_quantized(tmp_path, NAME, "RedHatAI quantized.w4a16")
    found = find_checkpoint(str(folder), progress=lambda stage, share: None)
    layers = shape_of(NAME, found.config).num_shared_parameters
    num_weights = 2 * 7
    assert found.num_packed_bytes == layers // 2 + num_weights * 2 * 8  # and shapes, in int64


def test_no_rank_is_started_for_a_quantised_checkpoint(tmp_path: Path) -> None:
    folder = write_hub_form(tmp_path / "model", "Qwen/Qwen2.5-VL-32B-Instruct")
    add_config(folder, INT4)
    source = ParallelSource(LoadPlan(str(folder), tensor_parallel=2))
    with pytest.raises(ModelLoadError, match="quantised layers run on one device"):
        source.load(lambda stage, share: None)
    source.close()


def test_a_quantization_is_loaded_or_unknown() -> None:
    assert TargetSettings(model="m", quantization="nf4").load_plan.quantization == "nf4"
    with pytest.raises(SettingsError, match="use int8 or nf4"):
        LoadPlan("m", quantization="int2")
