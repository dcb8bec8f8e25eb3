"""Chooses the device and the dtype of a plan's model."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from hippo.errors import ModelLoadError
from hippo.models.interface.checkpoint import Checkpoint
from hippo.models.interface.plan import LoadPlan
from hippo.models.products.linear import has_half_linear, packs_weights

if TYPE_CHECKING:
    from hippo.models.products.shards import Shards
    from hippo.models.quantized.forms import WeightForm

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


def device_of(plan: LoadPlan, shards: "Shards | None") -> torch.device:
    """Returns this process's device; raises ModelLoadError as parse_device does."""
    return parse_device(plan.rank_devices[0]) if shards is None else shards.group.device


def dtype_of(
    plan: LoadPlan, checkpoint: Checkpoint, device: torch.device, form: "WeightForm | None" = None
) -> torch.dtype:
    """Returns the plan's dtype, with auto resolved as LoadPlan says, or the preferred dtype of a
    quantised form if its products do not take that one.

    Raises ModelLoadError for a given dtype that the products do not take.
    """
    is_auto = plan.dtype == "auto"
    dtype = _own_dtype(checkpoint) if is_auto else DTYPES[plan.dtype]
    if is_auto and device.type == "cpu":
        dtype = _fast_dtype(dtype, device, any_will_do=plan.auto_is_half)
    if form is None or not form.dtypes or dtype in form.dtypes:
        return dtype
    if not is_auto:
        best = str(form.dtypes[0]).removeprefix("torch.")
        raise ModelLoadError(
            f"{checkpoint.name}: products with {form.name} weights fail or overflow in "
            f"{plan.dtype} here: use --dtype {best}, or leave it out"
        )
    return form.dtypes[0]


def _own_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Returns the dtype that a checkpoint's configuration names."""
    text = checkpoint.config.get("text_config") or {}
    own = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    own = own or text.get("dtype") or text.get("torch_dtype") or "float32"
    return DTYPES.get(str(own).removeprefix("torch."), torch.float32)


def _fast_dtype(own: torch.dtype, device: torch.device, *, any_will_do: bool) -> torch.dtype:
    """Returns the dtype that a CPU multiplies fast: ``own`` or float32, and with ``any_will_do``
    the narrowest whose products have the least overhead."""
    is_fast = {
        torch.float16: has_half_linear(),
        torch.bfloat16: packs_weights(device, torch.bfloat16),
    }
    wanted = (torch.float16, torch.bfloat16) if any_will_do else (own,)
    return next((dtype for dtype in wanted if is_fast.get(dtype)), torch.float32)
