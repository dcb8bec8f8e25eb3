"""Memory of the caches."""

import math
import mmap
from collections.abc import Sequence

import torch


def zeros(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns zeros; on a CPU their pages become resident only when they are written."""
    if device.type != "cpu":
        return torch.zeros(*sizes, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(sizes) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(*sizes)
