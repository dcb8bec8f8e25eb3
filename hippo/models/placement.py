"""Chooses the device and the dtype of a plan's model."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from hippo.errors import ModelLoadError
from hippo.models.checkpoint import Checkpoint
from hippo.models.linear import has_half_linear
from hippo.models.plan import LoadPlan

if TYPE_CHECKING:
    from hippo.models.quantized import Quantization
    from hippo.parallel.shards import Shards

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
)


def parse_device(name: str) -> torch.device:
    """Returns the device of this name; raises ModelLoadError if it is unknown or not available."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelLoadError(f"device {name!r} is unknown: use cpu, cuda or cuda:N") from error
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            found = f"only {count} CUDA devices are here" if count else "no CUDA device is here"
            raise ModelLoadError(f"device {name!r} cannot be used: {found}; use cpu")
        return torch.device("cuda", device.index or 0)
    if device.type != "cpu":
        raise ModelLoadError(f"device {name!r} is not supported: use cpu, cuda or cuda:N")
    return device


def device_of(plan: LoadPlan, shards: Shards | None) -> torch.device:
    """Returns this process's device; raises ModelLoadError as parse_device does."""
    return parse_device(plan.rank_devices[0]) if shards is None else shards.group.device


def dtype_of(
    plan: LoadPlan,
    checkpoint: Checkpoint,
    device: torch.device,
    quantization: Quantization | None = None,
) -> torch.dtype:
    """Returns the plan's dtype, with auto resolved as LoadPlan says.

    Raises ModelLoadError for float16 on a CPU that cannot multiply it, for another dtype than that
    of the quantisation's kernels, and for float16 where these would overflow.
    """
    if quantization is not None and quantization.only_dtype is not None:
        if plan.dtype not in ("auto", quantization.only_dtype):
            raise ModelLoadError(
                f"{checkpoint.name}: the kernels of {quantization.name} compute in "
                f"{quantization.only_dtype}: leave --dtype out"
            )
        return DTYPES[quantization.only_dtype]
    if plan.dtype != "auto":
        dtype = DTYPES[plan.dtype]
    elif plan.auto_is_half and device.type == "cpu":
        dtype = torch.float16
    else:
        text = checkpoint.config.get("text_config") or {}
        own = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
        own = own or text.get("dtype") or text.get("torch_dtype") or "float32"
        dtype = DTYPES.get(str(own).removeprefix("torch."), torch.float32)
    if dtype == torch.float16 and quantization is not None and quantization.overflows_half:
        if plan.dtype == "float16":
            raise ModelLoadError(
                f"{checkpoint.name}: with {quantization.name} weights products overflow float16: "
                "use --dtype bfloat16"
            )
        dtype = torch.bfloat16
    if dtype == torch.float16 and device.type == "cpu" and not has_half_linear():
        if plan.dtype == "float16":
            raise ModelLoadError(
                "float16 on a CPU needs torch's fbgemm, which this machine lacks: use bfloat16 or "
                "float32"
            )
        dtype = torch.float32
    return dtype
