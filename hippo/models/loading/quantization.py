"""How a checkpoint's weights are quantised, decided before any weight is read.

Layers that stay quantised run through the quantiser's own modules, which transformers puts in the
place of the linear layers. Where a form has no kernels, its weights are dequantised while they are
read, and the layers are those of a plain checkpoint. ``find_quantization`` refuses what can run in
neither way.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hippo.catalog.shapes import (
    WIDER_THAN_NESTED,
    column_counts,
    find_experts,
    has_packable_groups,
    has_packable_integers,
    has_packable_sizes,
    quantization_settings,
    wider_scales,
)
from hippo.errors import ModelLoadError
from hippo.models.interface.checkpoint import Checkpoint
from hippo.models.interface.plan import LoadPlan
from hippo.models.loading.placement import dtype_of
from hippo.models.quantized import awq
from hippo.models.quantized.forms import Quantization
from hippo.models.quantized.packed import can_pack

_log = logging.getLogger(__name__)

_FP8_CAPABILITY = (8, 9)  # of GPUs that multiply FP8: Ada Lovelace, Hopper and later ones
_HOPPER = 9  # major number of its capability

Packs = Callable[[int, bool], bool]  # whether kernels multiply weights of so many bits, zero points
"""Whether layers with weights of so many bits run by the kernels of
hippo.models.quantized.packed."""

_MIXING = "a token's logits depend on the other tokens of a forward"


def find_quantization(
    plan: LoadPlan, checkpoint: Checkpoint, device: torch.device
) -> Quantization | None:
    """Returns how the weights are quantised; None: not at all.

    Raises ModelLoadError for a form that the device or the installed packages cannot run, for
    experts, for tensor parallelism, and for a quantised checkpoint that the plan would quantise
    again.
    """
    settings = quantization_settings(checkpoint.config)

    def packs(bits: int, has_zeros: bool) -> bool:
        dtype = dtype_of(plan, checkpoint, device)
        return has_packable_sizes(checkpoint.config) and can_pack(device, bits, dtype, has_zeros)

    if find_experts(checkpoint.config.get("text_config") or {}) is not None:
        _refuse_with_experts(plan, checkpoint, settings)
    if settings is None:
        if plan.quantization is None:
            return None
        _require_packages(checkpoint, plan.quantization, _LOAD_PACKAGES[plan.quantization])
        is_int8 = plan.quantization == "int8"
        is_packed = packs(8 if is_int8 else 4, False)
        by_package = device.type == "cuda" and not is_packed
        return Quantization(
            name=plan.quantization,
            overflows_half=is_int8 and by_package,
            rounds_by_rows=not is_int8 and by_package,
            is_packed=is_packed,
            wider_scales=WIDER_THAN_NESTED if is_packed and not is_int8 else 0.0,
        )
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
    found = _METHODS[method](checkpoint, dict(settings), device, packs)
    if found.mixes_rows and plan.exact_rows is not None:
        raise ModelLoadError(
            f"{checkpoint.name}: with {found.name} {_MIXING}: leave --deterministic out, or use "
            "another form of the model"
        )
    return found


def warn_of_mixing(
    plan: LoadPlan, checkpoint: Checkpoint, quantization: Quantization | None, dtype: torch.dtype
) -> None:
    """Logs a warning if the form of quantisation lets the number of rows, or the other rows of a
    forward, change logits by more than the rounding of plain weights."""
    if quantization is None:
        return
    differs = "so that answers may differ from those of the target alone"
    if quantization.mixes_rows:
        _log.warning("%s: with %s %s, %s", checkpoint.name, quantization.name, _MIXING, differs)
    elif quantization.rounds_by_rows and dtype.itemsize == 2 and plan.exact_rows is None:
        _log.warning(
            "%s: the kernels of %s round more for a few rows than for many, %s; --deterministic "
            "avoids it",
            checkpoint.name,
            quantization.name,
            differs,
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


def _bitsandbytes(
    checkpoint: Checkpoint, settings: dict[str, Any], device: torch.device, packs: Packs
) -> Quantization:
    _require_packages(checkpoint, "bitsandbytes", ("bitsandbytes",))
    if settings.get("load_in_8bit"):
        has_outliers = float(settings.get("llm_int8_threshold", 6.0)) > 0
        return Quantization(name="LLM.int8()", settings=settings, mixes_rows=has_outliers)
    is_packed = packs(4, False)
    return Quantization(
        name=f"bitsandbytes {settings.get('bnb_4bit_quant_type', 'fp4')}",
        settings=settings,
        rounds_by_rows=device.type == "cuda" and not is_packed,
        is_packed=is_packed,
        wider_scales=wider_scales(checkpoint.config) if is_packed else 0.0,
    )


def _awq(
    checkpoint: Checkpoint, settings: dict[str, Any], device: torch.device, packs: Packs
) -> Quantization:
    widths = column_counts(checkpoint.config)
    if (problem := awq.problem_of(settings, widths)) is not None:
        raise ModelLoadError(f"{checkpoint.name}: {problem}: use another form of the model")
    settings |= {"quant_method": awq.QUANT_METHOD}
    if not has_packable_groups(settings.get("group_size", 128)) or not packs(4, True):
        return Quantization(name="awq", settings=settings, is_kept=False)
    wider = wider_scales(checkpoint.config)
    return Quantization(name="awq", settings=settings, is_packed=True, wider_scales=wider)


def _gptq(
    checkpoint: Checkpoint, settings: dict[str, Any], device: torch.device, packs: Packs
) -> Quantization:
    if device.type != "cuda":
        raise ModelLoadError(
            f"{checkpoint.name} is quantised by gptq, whose kernels need a GPU: use --device "
            "cuda, or an AWQ, bitsandbytes or plain form of the model"
        )
    _require_packages(checkpoint, "gptq", ("gptqmodel", "optimum"))
    return Quantization(name="gptq", settings=settings)


def _fine_grained_fp8(
    checkpoint: Checkpoint, settings: dict[str, Any], device: torch.device, packs: Packs
) -> Quantization:
    if not _multiplies_fp8(device):
        return Quantization(name="fp8", settings=settings | {"dequantize": True}, is_kept=False)
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
    return Quantization(name="fp8", settings=settings)


def _compressed_tensors(
    checkpoint: Checkpoint, settings: dict[str, Any], device: torch.device, packs: Packs
) -> Quantization:
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
        return Quantization(
            name=name,
            settings=settings | {"use_optimized_inference": True},
            only_dtype=None if is_hopper else "bfloat16",
        )
    if has_packable_integers(checkpoint.config) and packs(weights["num_bits"], False):
        wider = wider_scales(checkpoint.config)
        return Quantization(name=name, settings=settings, is_packed=True, wider_scales=wider)
    return Quantization(name=name, settings=settings | {"dequantize": True}, is_kept=False)


def _torchao(
    checkpoint: Checkpoint, settings: dict[str, Any], device: torch.device, packs: Packs
) -> Quantization:
    _require_packages(checkpoint, "torchao", ("torchao",))
    form = json.dumps(settings.get("quant_type"))
    scales_whole_batch = "DynamicActivation" in form and "PerTensor" in form
    return Quantization(
        name="torchao",
        settings=settings,
        mixes_rows=scales_whole_batch,
        overflows_half="Int8WeightOnly" in form and device.type == "cuda",
    )


_Method = Callable[[Checkpoint, dict[str, Any], torch.device, Packs], Quantization]

_METHODS: dict[str, _Method] = {
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


_LOAD_PACKAGES = {"int8": ("torchao",), "nf4": ("bitsandbytes",)}
