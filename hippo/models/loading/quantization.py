"""How a checkpoint's weights are quantised, decided before any weight is read.

Layers that stay quantised run through the quantiser's own modules, which transformers puts in the
place of the linear layers. Where a form has no kernels, its weights are dequantised while they are
read, and the layers are plain. ``find_quantization`` refuses what can run in
neither way.
"""

import importlib
import importlib.util
import json
import logging
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hippo.catalog.shapes import (
    INT4_WITH_ZEROS,
    column_counts,
    find_experts,
    packed_bits,
    quantization_settings,
)
from hippo.errors import ModelLoadError
from hippo.models.interface.checkpoint import Checkpoint
from hippo.models.interface.plan import LoadPlan
from hippo.models.loading.placement import dtype_of
from hippo.models.quantized import awq
from hippo.models.quantized.forms import Dequantised, Packed, WeightForm
from hippo.models.quantized.packed import can_pack

_log = logging.getLogger(__name__)

_FP8_CAPABILITY = (8, 9)  # GPUs from Ada Lovelace and Hopper on multiply FP8
_HOPPER = 9  # major number of its capability

# torchao rounds sums of int8 weights before it scales them; in common models they are beyond
# float16's range then.
_INT8_DTYPES = (torch.bfloat16, torch.float32)

_LOAD_PACKAGES = {"int8": ("torchao",), "nf4": ("bitsandbytes",)}


def find_quantization(
    plan: LoadPlan, checkpoint: Checkpoint, device: torch.device
) -> WeightForm | None:
    """Returns the form of the quantised weights; None: they are plain.

    Raises ModelLoadError for a form that the device or the installed packages cannot run, for a
    form that lets a token's logits depend on other tokens, for experts, for tensor parallelism, and
    for a quantised checkpoint that the plan would quantise again.
    """
    settings = quantization_settings(checkpoint.config)
    if find_experts(checkpoint.config.get("text_config") or {}) is not None:
        _refuse_with_experts(plan, checkpoint, settings)
    if settings is None:
        return None if plan.quantization is None else _at_load(plan, checkpoint, device)
    method = str(settings.get("quant_method", "")).lower()
    if method not in _METHODS:
        raise ModelLoadError(
            f"{checkpoint.name} is quantised by {method or 'an unnamed method'!r}, which is not "
            f"supported; supported: {', '.join(sorted(_METHODS))}"
        )
    if plan.quantization is not None:
        raise ModelLoadError(
            f"{checkpoint.name} is quantised already ({method}): leave --quantization out"
        )
    if plan.tensor_parallel > 1:
        raise ModelLoadError(
            f"{checkpoint.name} is quantised ({method}), and quantised layers run on one device: "
            "leave --tensor-parallel out, or use a checkpoint that is not quantised"
        )
    return _METHODS[method](
        checkpoint, dict(settings), device, _packed_bits(plan, checkpoint, device)
    )


def _packed_bits(plan: LoadPlan, checkpoint: Checkpoint, device: torch.device) -> float | None:
    """Returns packed_bits if the device has the kernels; else None."""
    bits = packed_bits(checkpoint.config, plan.quantization)
    dtype = dtype_of(plan, checkpoint, device)
    has_kernels = bits is not None and can_pack(device, int(bits), dtype, bits == INT4_WITH_ZEROS)
    return bits if has_kernels else None


def _at_load(plan: LoadPlan, checkpoint: Checkpoint, device: torch.device) -> WeightForm:
    name = plan.quantization
    assert name is not None
    _require_packages(checkpoint, name, _LOAD_PACKAGES[name])
    if (bits := _packed_bits(plan, checkpoint, device)) is not None:
        return Packed(name=name, bits=bits)
    is_gpu = device.type == "cuda"
    if name == "int8":
        return WeightForm(name=name, dtypes=_INT8_DTYPES if is_gpu else ())
    return WeightForm(name=name, rounds_by_rows=is_gpu)


def warn_of_rounding(
    plan: LoadPlan, checkpoint: Checkpoint, form: WeightForm | None, dtype: torch.dtype
) -> None:
    """Logs a warning if the number of rows of a forward changes logits by more than the rounding of
    plain weights."""
    if form is None or not form.rounds_by_rows:
        return
    if dtype.itemsize == 2 and plan.exact_rows is None:
        _log.warning(
            "%s: the kernels of %s round more for a few rows than for many, so that answers may "
            "differ from the target's own; --deterministic avoids it",
            checkpoint.name,
            form.name,
        )


def _refuse_with_experts(
    plan: LoadPlan, checkpoint: Checkpoint, settings: dict[str, Any] | None
) -> None:
    """Raises ModelLoadError for what does not go with a mixture of experts."""
    if settings is not None:
        raise ModelLoadError(
            f"{checkpoint.name} is quantised and has a mixture of experts, which only runs "
            "unquantised: use the form of the model that is not quantised"
        )
    if plan.quantization is not None:
        raise ModelLoadError(
            f"{checkpoint.name} has a mixture of experts, which is not quantised at load: leave "
            "--quantization out"
        )
    if plan.exact_rows is not None:
        raise ModelLoadError(
            f"{checkpoint.name} has a mixture of experts, where the last bits of a token's logits "
            "depend on how many tokens of a forward choose the same expert: leave --deterministic "
            "out"
        )


def is_installed(package: str) -> bool:
    """Whether a package can be imported."""
    return importlib.util.find_spec(package) is not None


def _require_packages(checkpoint: Checkpoint, method: str, packages: Iterable[str]) -> None:
    missing = [name for name in packages if not is_installed(name)]
    if missing:
        names = " ".join(name.replace("_", "-") for name in missing)
        raise ModelLoadError(
            f"{checkpoint.name}: its weights in the form {method} need {names}, which is not "
            f"installed: pip install {names}"
        )


def _refuse_mixing(checkpoint: Checkpoint, form: str) -> None:
    raise ModelLoadError(
        f"{checkpoint.name}: with {form} a token's logits depend on the other tokens of a forward, "
        "so that answers would differ from the target's own: use another form of the model"
    )


def _bitsandbytes(
    checkpoint: Checkpoint, settings: dict[str, Any], device: torch.device, bits: float | None
) -> WeightForm:
    if settings.get("load_in_8bit") and float(settings.get("llm_int8_threshold", 6.0)) > 0:
        _refuse_mixing(checkpoint, "LLM.int8()")
    _require_packages(checkpoint, "bitsandbytes", ("bitsandbytes",))
    if settings.get("load_in_8bit"):
        return WeightForm(name="LLM.int8() without outliers", settings=settings)
    name = f"bitsandbytes {settings.get('bnb_4bit_quant_type', 'fp4')}"
    if bits is not None:
        return Packed(name=name, settings=settings, bits=bits)
    return WeightForm(name=name, settings=settings, rounds_by_rows=device.type == "cuda")


def _awq(
    checkpoint: Checkpoint, settings: dict[str, Any], device: torch.device, bits: float | None
) -> WeightForm:
    widths = column_counts(checkpoint.config)
    if (problem := awq.problem_of(settings, widths)) is not None:
        raise ModelLoadError(f"{checkpoint.name}: {problem}: use another form of the model")
    settings |= {"quant_method": awq.QUANT_METHOD}
    if bits is None:
        return Dequantised(name="awq", settings=settings)
    return Packed(name="awq", settings=settings, bits=bits)


def _gptq(
    checkpoint: Checkpoint, settings: dict[str, Any], device: torch.device, bits: float | None
) -> WeightForm:
    if device.type != "cuda":
        raise ModelLoadError(
            f"{checkpoint.name} is quantised by gptq, whose kernels need a GPU: use --device "
            "cuda, or an AWQ, bitsandbytes or plain form of the model"
        )
    _require_packages(checkpoint, "gptq", ("gptqmodel", "optimum"))
    return WeightForm(name="gptq", settings=settings)


def _fine_grained_fp8(
    checkpoint: Checkpoint, settings: dict[str, Any], device: torch.device, bits: float | None
) -> WeightForm:
    if not _multiplies_fp8(device):
        return Dequantised(name="fp8", settings=settings | {"dequantize": True})
    _require_packages(checkpoint, "fp8", ("kernels",))
    # transformers would rather fetch DeepGEMM and compile it, at the first forward.
    os.environ.setdefault("TRANSFORMERS_DISABLE_DEEPGEMM_LINEAR", "1")
    try:
        importlib.import_module(
            "transformers.integrations.finegrained_fp8"
        ).load_finegrained_fp8_kernel()
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        raise ModelLoadError(
            f"{checkpoint.name}: its FP8 kernels cannot be loaded from the hub (kernels-community/"
            f"finegrained-fp8): {error}"
        ) from error
    return WeightForm(name="fp8", settings=settings)


def _compressed_tensors(
    checkpoint: Checkpoint, settings: dict[str, Any], device: torch.device, bits: float | None
) -> WeightForm:
    _require_packages(checkpoint, "compressed-tensors", ("compressed_tensors",))
    groups = list((settings.get("config_groups") or {}).values())
    sparsity = (settings.get("sparsity_config") or {}).get("format", "dense")
    if len(groups) != 1 or sparsity != "dense":
        raise ModelLoadError(
            f"{checkpoint.name}: compressed-tensors with {len(groups)} groups of layers or with "
            "sparse weights is not supported: use a form whose layers are all quantised in one way"
        )
    weights = groups[0].get("weights") or {}
    name = f"compressed-tensors {weights.get('type', 'int')}{weights.get('num_bits', '')}"
    # The cache has its own dtype; transformers would hook the modules of attention.
    settings = settings | {"kv_cache_scheme": None}
    if _multiplies_fp8(device) and (weights.get("type"), weights.get("num_bits")) == ("float", 8):
        # torch multiplies FP8 with a scale for each row into other dtypes on Hopper alone.
        is_hopper = torch.cuda.get_device_capability(device)[0] == _HOPPER
        return WeightForm(
            name=name,
            settings=settings | {"use_optimized_inference": True},
            dtypes=() if is_hopper else (torch.bfloat16,),
        )
    if bits is not None:
        return Packed(name=name, settings=settings, bits=bits)
    return Dequantised(name=name, settings=settings | {"dequantize": True})


def _torchao(
    checkpoint: Checkpoint, settings: dict[str, Any], device: torch.device, bits: float | None
) -> WeightForm:
    form = json.dumps(settings.get("quant_type"))
    if "DynamicActivation" in form and "PerTensor" in form:
        _refuse_mixing(
            checkpoint, "one scale for the activations of all rows (torchao's PerTensor)"
        )
    _require_packages(checkpoint, "torchao", ("torchao",))
    overflows = "Int8WeightOnly" in form and device.type == "cuda"
    return WeightForm(name="torchao", settings=settings, dtypes=_INT8_DTYPES if overflows else ())


_METHODS: dict[
    str, Callable[[Checkpoint, dict[str, Any], torch.device, float | None], WeightForm]
] = {
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fine_grained_fp8,
    "gptq": _gptq,
    "torchao": _torchao,
}


def _multiplies_fp8(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY
