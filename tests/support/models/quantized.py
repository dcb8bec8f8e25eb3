"""Small counterparts of the hub's quantised repositories, and plain ones with the same weights.

Names of weights, their dtypes and the configurations are as the repositories publish them; a plain
counterpart stores what the quantised numbers stand for, which is what transformers' own forward
is to be compared with.
"""

import importlib
import json
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.models.hub_forms import write_hub_form

Stored = dict[str, torch.Tensor]
"""What is stored in place of ``weight``, by the names behind the module's."""


def _nf4(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    functional: Any = importlib.import_module("bitsandbytes.functional")
    packed, state = functional.quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
    stored = {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
    return stored | {"weight": packed}, functional.dequantize_4bit(packed, state)


def _fp8_blocks(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    height, width = (-(-side // 128) for side in weight.shape)
    scales = torch.empty(height, width)
    small = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    whole = torch.empty_like(weight)
    for row in range(height):
        for column in range(width):
            place = (slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128))
            scales[row, column] = weight[place].abs().max() / 448
            small[place] = (weight[place] / scales[row, column]).to(small.dtype)
            whole[place] = small[place].float() * scales[row, column]
    return {"weight": small, "weight_scale_inv": scales}, whole


def _rows_by(
    weight: torch.Tensor, most: int, rounded: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[Stored, torch.Tensor]:
    scales = (weight.abs().amax(1, keepdim=True) / most).bfloat16()
    small = rounded(weight / scales.float())
    return {"weight": small, "weight_scale": scales}, (small.bfloat16() * scales).float()


def _fp8_rows(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    return _rows_by(weight, 448, lambda x: x.clamp(-448, 448).to(torch.float8_e4m3fn))


def _int8_rows(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    return _rows_by(weight, 127, lambda x: x.round().clamp(-128, 127).to(torch.int8))


def _int4_groups(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    helpers: Any = importlib.import_module("compressed_tensors.compressors.pack_quantized.helpers")
    groups = weight.view(weight.shape[0], -1, 128)
    scales = (groups.abs().amax(2, keepdim=True) / 7).bfloat16()
    small = (groups / scales.float()).round().clamp(-8, 7)
    whole = (small.bfloat16() * scales).float().view(weight.shape)
    stored = {
        "weight_packed": helpers.pack_to_int32(small.view(weight.shape).to(torch.int8), 4),
        "weight_scale": scales.squeeze(2),
        "weight_shape": torch.tensor(weight.shape),
    }
    return stored, whole


def _awq(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    groups = weight.view(weight.shape[0], -1, 128)
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales).round().clamp(0, 15)
    numbers = (groups / scales + zeros).round().clamp(0, 15)
    stored = {
        "qweight": _packed_by_autoawq(numbers.view(weight.shape).T),
        "qzeros": _packed_by_autoawq(zeros.squeeze(2).T),
        "scales": scales.squeeze(2).T,
    }
    return stored, ((numbers - zeros) * scales).view(weight.shape)


def _packed_by_autoawq(numbers: torch.Tensor) -> torch.Tensor:
    """As ``WQLinear_GEMM.from_linear`` of AutoAWQ."""
    numbers = numbers.to(torch.int32)
    packed = numbers.new_zeros(numbers.shape[0], numbers.shape[1] // 8)
    for place in range(packed.shape[1]):
        for index, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            packed[:, place] |= numbers[:, 8 * place + column] << (4 * index)
    return packed


def bitsandbytes_config(*, is_4bit: bool) -> dict[str, Any]:
    return {
        "bnb_4bit_compute_dtype": "float32",  # the hub's bfloat16 rounds each layer
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "llm_int8_skip_modules": [
            "lm_head",
            "visual",
            "vision_tower",
            "multi_modal_projector",
            "in_proj_a",
            "in_proj_b",
        ],
        "llm_int8_threshold": 6.0,
        "load_in_4bit": is_4bit,
        "load_in_8bit": not is_4bit,
        "quant_method": "bitsandbytes",
    }


def _compressed_config(
    form: str, weights: dict[str, Any], activations: dict[str, Any] | None
) -> dict[str, Any]:
    common: dict[str, Any] = {"actorder": None, "symmetric": True}
    rows: dict[str, Any] = {"dynamic": True, "strategy": "token", "group_size": None} | common
    return {
        "config_groups": {
            "group_0": {
                "input_activations": None if activations is None else rows | activations,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {"dynamic": False, "group_size": None} | common | weights,
            }
        },
        "format": form,
        "ignore": ["re:visual.*", "lm_head", "re:.*in_proj_[ab]$"],
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {"format": "dense"},
    }


FLOAT8, INT8 = {"num_bits": 8, "type": "float"}, {"num_bits": 8, "type": "int"}
AWQ_CONFIG = {
    "bits": 4,
    "group_size": 128,
    "modules_to_not_convert": ["visual", "in_proj_a", "in_proj_b"],
    "quant_method": "awq",
    "version": "gemm",
    "zero_point": True,
}

FORMS: dict[str, tuple[Callable[[torch.Tensor], tuple[Stored, torch.Tensor]], dict[str, Any]]] = {
    "unsloth bnb-4bit": (_nf4, bitsandbytes_config(is_4bit=True)),
    "Qwen FP8": (
        _fp8_blocks,
        {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": ["lm_head", "visual", "in_proj_a", "in_proj_b"],
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
    ),
    "RedHatAI FP8-dynamic": (
        _fp8_rows,
        _compressed_config("float-quantized", FLOAT8 | {"strategy": "channel"}, FLOAT8),
    ),
    "RedHatAI quantized.w8a8": (
        _int8_rows,
        _compressed_config("int-quantized", INT8 | {"strategy": "channel"}, INT8),
    ),
    "RedHatAI quantized.w4a16": (
        _int4_groups,
        _compressed_config(
            "pack-quantized",
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
            None,
        ),
    ),
    "Qwen AWQ": (_awq, AWQ_CONFIG),
}
"""How each form stores a weight, and its ``quantization_config``."""

GPTQ_CONFIG = {"bits": 4, "desc_act": False, "group_size": 128, "quant_method": "gptq", "sym": True}


def has_packages() -> bool:
    """Whether the packages of the optional group ``quantized`` are installed."""
    return all(map(find_spec, ("bitsandbytes", "compressed_tensors", "torchao")))


def write_quantized(folder: Path, name: str, form: str) -> tuple[Path, Path]:
    """Saves the hub's repository ``name``, in small, quantised in one of ``FORMS``, and a plain
    checkpoint with the same weights in float32; returns both folders."""
    folders = write_hub_form(folder / "quantised", name), write_hub_form(folder / "plain", name)
    add_config(folders[0], FORMS[form][1])
    weight_map: dict[str, str] = {}
    for path in sorted(folders[0].glob("*.safetensors")):
        stored, plain = quantise(load_file(path), form)
        weight_map |= dict.fromkeys(stored, path.name)
        save_file(stored, path, metadata={"format": "pt"})
        save_file(plain, folders[1] / path.name, metadata={"format": "pt"})
    index = folders[0] / "model.safetensors.index.json"
    if index.exists():
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folders


def quantise(
    weights: Mapping[str, torch.Tensor], form: str, *, device: str = "cpu", has_plain: bool = True
) -> tuple[Stored, Stored]:
    """Returns what a repository in one of ``FORMS`` stores for a file's weights, and in float32
    what that stands for (nothing without ``has_plain``); the arithmetic runs on ``device``."""
    quantise_weight, _ = FORMS[form]
    stored, plain = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for key, weight in weights.items():
        ends = ("proj.weight", "proj_qkv.weight", "proj_z.weight")
        if "layers." in key and key.endswith(ends) and "vision" not in key:
            parts, whole = quantise_weight(weight.to(device).float())
            stem = key.removesuffix("weight")
            stored |= {stem + suffix: part.cpu().contiguous() for suffix, part in parts.items()}
        else:
            stored[key], whole = weight, weight
        if has_plain:
            plain[key] = whole.float().cpu()
    return stored, plain


def add_config(folder: Path, quantization_config: dict[str, Any]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": quantization_config}
    path.write_text(json.dumps(config))
