"""Copies of numbers from the host to a device."""

from collections.abc import Sequence

import torch

_STAGED_BYTES = 1 << 16  # CUDA's documentation, "API synchronization behavior"


def to_device(numbers: torch.Tensor | Sequence[int], device: torch.device) -> torch.Tensor:
    """Copies a host tensor or ids to ``device`` without waiting for the device's computations.

    The CUDA driver stages small copies before the call returns, but would wait for large copies.
    Large tensors are therefore first copied to pinned memory, which torch keeps until the copy is
    complete.
    """
    tensor = numbers if isinstance(numbers, torch.Tensor) else torch.tensor(numbers)
    if tensor.device == device:
        return tensor
    if device.type == "cuda" and tensor.nbytes > _STAGED_BYTES:
        tensor = tensor.contiguous().pin_memory()  # it refuses expanded tensors
    return tensor.to(device, non_blocking=True)
