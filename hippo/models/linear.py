"""Matrix products with a fixed weight, in the form that is fastest for few rows.

On a CPU, oneDNN or MKL packs a weight once. A product of one row or of eight rows then reads the
weight once, whereas a plain product packs the weight every time and is up to three times as slow
for 16 rows. With a packed weight the bits of a row's result do not depend on the rows beside it.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch.nn.functional import linear

_TYPICAL_ROWS = 8  # oneDNN packs for this number of rows; other numbers work as well

_MKL_ROWS = 256  # MKL packs for this number of rows; products of fewer rows take no longer

_ALIGNED_ROWS = 64  # NVIDIA, Matrix Multiplication Background: 128 bytes of 16-bit numbers

_EXACT_ROWS = 33  # one settled token and 32 draft tokens


def padded_rows(num_rows: int) -> int:
    """Returns the number of rows to which a packed product of ``num_rows`` is best padded.

    oneDNN compiles a kernel for each number of rows at its first use; for all products of a forward
    this took as long as the forward itself. Batches of several sequences rarely have the same
    number twice, so only multiples of 8 are used above 33 rows (of 16 above 128, of 64 above 256).
    """
    if num_rows <= _EXACT_ROWS:
        return num_rows
    step = 8 if num_rows <= 128 else 16 if num_rows <= 256 else 64
    return -(-num_rows // step) * step


def aligned_rows(num_rows: int) -> int:
    """Returns the number of a weight's rows at which a GPU's products are fastest: tensor cores
    work on blocks of rows, and a result whose rows begin at odd addresses is written slowly."""
    return -(-num_rows // _ALIGNED_ROWS) * _ALIGNED_ROWS


Linear = Callable[[torch.Tensor], torch.Tensor]
"""Maps ``x`` ``[..., in]`` to ``x @ weight.T + bias`` ``[..., out]``."""


class MakeLinear(Protocol):
    """Makes the product with a weight ``[out, in]`` and a bias ``[out]``."""

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """Returns the product; the caller may empty the module's parameter afterwards."""


def is_plain(module: torch.nn.Module) -> bool:
    """Whether a module is torch's linear layer with a plain weight, which other products can
    replace; a quantiser's module is called as it is."""
    if not isinstance(module, torch.nn.Linear):
        return False
    weight = getattr(module, "weight", None)  # compressed-tensors' layers have another
    if weight is None or not weight.is_floating_point():
        return False
    return type(module).__module__.startswith("torch.") and not is_quantized(weight)


def is_quantized(weight: torch.Tensor) -> bool:
    """Whether a weight of one of torch's modules is quantised, by torchao."""
    return type(weight).__module__.startswith("torchao")


def packs_weights(device: torch.device) -> bool:
    """Whether make_linear packs weights on the device, so that padded_rows saves time."""
    return device.type == "cpu" and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Makes a product in the weight's dtype: packed on a CPU with oneDNN, by MKL for float32 on an
    Intel processor and by oneDNN otherwise; plain elsewhere."""
    if not packs_weights(weight.device):
        # Separate tensors: the caller may empty the module's parameter afterwards.
        own_weight, own_bias = weight.detach(), None if bias is None else bias.detach()
        return lambda x: linear(x, own_weight, own_bias)
    # These operators are those of torch.compile's CPU backend.
    if weight.dtype == torch.float32 and _has_fast_mkl():
        mkl_packed = torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), _MKL_ROWS)
        shape = weight.new_empty(()).expand(weight.shape)  # the operator reads only its shape
        multiply_mkl = torch.ops.mkl._mkl_linear.default
        return lambda x: multiply_mkl(x, mkl_packed, shape, bias, x.numel() // x.shape[-1])
    multiply = torch.ops.mkldnn._linear_pointwise.default
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _TYPICAL_ROWS)
    return lambda x: multiply(x, packed, bias, "none", [], "")


@functools.cache
def _has_fast_mkl() -> bool:
    """Whether torch has MKL and the processor is Intel's; MKL is slow on other processors."""
    with contextlib.suppress(OSError):
        processor = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        has_mkl: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
        return has_mkl and "GenuineIntel" in processor
    return False


def has_half_linear() -> bool:
    """Whether this CPU and this torch support make_half_linear."""
    return "fbgemm" in torch.backends.quantized.supported_engines and hasattr(
        torch, "fbgemm_linear_fp16_weight_fp32_activation"
    )


def make_half_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Makes a product of float32 rows with a weight stored in float16, on a CPU.

    The product reads half the memory, computes in float32 and has the least overhead. For one row
    it is twice as fast as make_linear in bfloat16 at the sizes of the bundled pair.
    """
    multiply = torch.fbgemm_linear_fp16_weight_fp32_activation
    with warnings.catch_warnings():
        # Both warn once that torch will drop them in favour of an operator with eight times the
        # overhead; has_half_linear checks that they exist.
        warnings.simplefilter("ignore", UserWarning)
        packed = torch.fbgemm_pack_gemm_matrix_fp16(weight.float().contiguous())
        multiply(weight.new_zeros(1, weight.shape[1], dtype=torch.float32), packed, bias)
    return lambda x: multiply(x, packed, bias)
