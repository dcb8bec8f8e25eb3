"""Matrix products with a fixed weight, in the form that is fastest for few rows.

On a CPU a weight is packed once by oneDNN: a product then costs one pass over it whether it is for
one row or for eight, where the plain product packs it every time, and is up to three times as slow
for 16 rows. With a packed weight a row's result has the same bits whatever rows are beside it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Protocol

import torch
from torch.nn.functional import linear

_TYPICAL_ROWS = 8  # what oneDNN lays weights out for; other numbers of rows work as well

_EXACT_ROWS = 33  # 32 draft tokens behind a settled one


def padded_rows(num_rows: int) -> int:
    """The number of rows to which a packed product of so many is best padded.

    oneDNN prepares code for each number of rows when it is met for the first time: for all the
    products of a forward that took as long as the forward itself. Batches of several sequences
    rarely have the same number twice, so beyond 33 rows only multiples of 8 are used (of 16 from
    128 on, of 64 from 256 on).
    """
    if num_rows <= _EXACT_ROWS:
        return num_rows
    step = 8 if num_rows <= 128 else 16 if num_rows <= 256 else 64
    return -(-num_rows // step) * step


Linear = Callable[[torch.Tensor], torch.Tensor]
"""``x @ weight.T + bias`` of ``[..., in]``: ``[..., out]``."""


class MakeLinear(Protocol):
    """Makes a product of a weight ``[out, in]``."""

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """The product, which keeps what it needs of the weight."""


def packs_weights(device: torch.device) -> bool:
    """Whether make_linear packs weights there, so that numbers of rows are best padded_rows."""
    return device.type == "cpu" and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """A product in the weight's dtype that treats all rows alike: packed on a CPU where torch has
    oneDNN, plain elsewhere."""
    if not packs_weights(weight.device):
        # Tensors of its own: the caller may empty the module's parameter afterwards.
        own_weight, own_bias = weight.detach(), None if bias is None else bias.detach()
        return lambda x: linear(x, own_weight, own_bias)
    # The operators that torch.compile's CPU backend packs weights with.
    operators = torch.ops.mkldnn
    multiply = operators._linear_pointwise.default
    packed = operators._reorder_linear_weight(weight.contiguous(), _TYPICAL_ROWS)

    def product(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = multiply(x, packed, bias, "none", [], "")
        return result

    return product


def has_half_linear() -> bool:
    """Whether this CPU and this torch can do make_half_linear."""
    return "fbgemm" in torch.backends.quantized.supported_engines and hasattr(
        torch, "fbgemm_linear_fp16_weight_fp32_activation"
    )


def make_half_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """A product of float32 rows with a weight kept in float16, on a CPU.

    Half the memory to read, float32 arithmetic, and the least overhead of all: for one row twice
    as fast as make_linear in bfloat16 at the sizes of the bundled pair.
    """
    multiply = torch.fbgemm_linear_fp16_weight_fp32_activation
    with warnings.catch_warnings():
        # Both say once a process that torch means to drop them in favour of an operator that
        # does the same with eight times the overhead; has_half_linear asks if they are there.
        warnings.simplefilter("ignore", UserWarning)
        packed = torch.fbgemm_pack_gemm_matrix_fp16(weight.float().contiguous())
        multiply(weight.new_zeros(1, weight.shape[1], dtype=torch.float32), packed, bias)
    return lambda x: multiply(x, packed, bias)
