"""Pieces of a decoder layer in the form that is fastest on a device, and the check of a kernel.

On a GPU the host launches an operation in about the time in which a small operation runs, so fewer
operations are faster; on a CPU the operations of the least arithmetic are.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import rms_norm

_LEAST_SCALE = torch.finfo(torch.float32).tiny  # a row of zeros has it

Norm = Callable[[torch.Tensor], torch.Tensor]
"""Normalises ``[rows, hidden_size]``."""


def norm_weight(module: Any) -> tuple[torch.Tensor, float]:
    """Returns weight and epsilon of an RMS normalisation; where the weight is stored as what is
    added to 1, in float32 (Qwen3.5)."""
    if hasattr(module, "variance_epsilon"):
        return module.weight, module.variance_epsilon
    return 1.0 + module.weight.detach().float(), module.eps


def make_norm(module: Any) -> Norm:
    """Returns the RMS normalisation of a transformers module.

    It is computed in float32. On a GPU it is one fused operation, rounded once; elsewhere it is
    rounded before the weight is applied, as in transformers, but for a weight in float32.
    """
    weight, eps = norm_weight(module)
    if weight.device.type == "cuda":
        shape, dtype = weight.shape, weight.dtype
        return lambda x: rms_norm(x.to(dtype), shape, weight, eps).to(x.dtype)
    inverse_size = 1.0 / weight.shape[0]
    epsilons = torch.full((1, 1), eps, device=weight.device)

    def normalise(x: torch.Tensor) -> torch.Tensor:
        # Five small operations; torch's rms_norm is equally exact but takes 1.5 times as long.
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(epsilons, norm, norm, value=inverse_size).rsqrt_()
        return (x * scale).to(weight.dtype).mul_(weight).to(x.dtype)

    return normalise


def difference_of(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> str | None:
    """Compares results that were computed in ``dtype`` with expected ones; returns None, or words
    about the difference.

    Kernels round differently, and later layers carry the differences on. What must agree is half of
    the dtype's digits: the largest difference in a row (the last dimension) is at most the square
    root of the dtype's epsilon, as a share of the row's largest expected number (float32: 3e-4;
    float16: 3e-2; bfloat16: 9e-2).
    """
    scale = expected.float().abs().amax(-1, keepdim=True).clamp_min(_LEAST_SCALE)
    difference = float(((found.float() - expected.float()).abs() / scale).max())
    if difference <= torch.finfo(dtype).eps ** 0.5:
        return None
    return f"a result differs by {difference:.1e} of the largest one in its row"
