"""Numbers of the host on their way to a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_STAGED_BYTES = 1 << 16  # CUDA's documentation, "API synchronization behavior"


def to_device(numbers: torch.Tensor | Sequence[int], device: torch.device) -> torch.Tensor:
    """A tensor of the host, or ids, on ``device``, without a wait for what that still computes.

    What is small is staged by the driver before the call returns. For what is large it would wait,
    so that is copied to pinned memory first, which torch keeps for as long as the copy takes.
    """
    tensor = numbers if isinstance(numbers, torch.Tensor) else torch.tensor(numbers)
    if tensor.device == device:
        return tensor
    if device.type == "cuda" and tensor.nbytes > _STAGED_BYTES:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
