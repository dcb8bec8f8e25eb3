"""Matrix products with a fixed weight, in the form that is fastest for few rows.

On a CPU, MKL, oneDNN or fbgemm packs a weight once. A product of one row or of eight rows then
reads the weight once, whereas a plain product packs the weight every time and is up to three times
as slow for 16 rows. What these libraries can multiply depends on the processor and on torch's
build, so each is tried on a small weight before it is used; where none can, products are plain.

Whether a row's bits depend on the rows beside it is a property of the kernel that a library chooses
for a processor and for the sizes of a weight. Only --deterministic needs to know, and measures it
(hippo.models.runners.fixed).
"""

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Protocol

import torch
from torch.nn.functional import linear

from hippo.models.products.kernels import difference_of

_log = logging.getLogger(__name__)

_TYPICAL_ROWS = 8  # oneDNN packs for this number of rows; other numbers work as well

_MKL_ROWS = 256  # MKL packs for this number of rows; products of fewer rows take no longer

_NARROW_ROWS = 4  # see _multiply_narrow

_ALIGNED_ROWS = 64  # NVIDIA, Matrix Multiplication Background: 128 bytes of 16-bit numbers

_EXACT_ROWS = 33  # one settled token and 32 draft tokens

# A weight and rows to try a product with. MKL's kernels for AVX2 sum long rows in parts, which
# depend on the number of rows.
_TRIED_SHAPE, _TRIED_ROWS = (200, 1024), 9


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


def packs_weights(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether make_linear packs weights of ``dtype`` on the device, so that padded_rows saves
    time."""
    return device.type == "cpu" and packing(dtype) is not None


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Makes a product in the weight's dtype: packed on a CPU that can, and plain elsewhere."""
    make = packing(weight.dtype) if weight.device.type == "cpu" else None
    return (make or _make_plain)(weight, bias)


@functools.cache
def packing(dtype: torch.dtype) -> MakeLinear | None:
    """Returns what makes packed products of ``dtype`` on this processor; None: nothing does.

    MKL is up to a quarter faster than oneDNN for one row of float32 by its kernels for AVX-512, and
    these give a row the same bits beside any other rows. Its other kernels do not, and are not
    used. oneDNN also takes bfloat16 where AVX-512 has no bfloat16 arithmetic, and is then slower
    than a plain product.
    """
    if dtype == torch.float32 and _is_right(_make_by_mkl, dtype) and _treats_rows_alike():
        return _make_by_mkl
    if dtype == torch.bfloat16 and not _has_bfloat16():
        return None
    return _make_by_onednn if _is_right(_make_by_onednn, dtype) else None


def _has_bfloat16() -> bool:
    """Whether the processor has arithmetic for bfloat16: avx512_bf16 or amx_bf16 on x86, and names
    with the same end on ARM."""
    capabilities = torch.cpu.get_capabilities()
    return any(has for name, has in capabilities.items() if name.endswith("bf16"))


def has_half_linear() -> bool:
    """Whether fbgemm multiplies float16 weights here, so that make_half_linear is fast."""
    return _is_right(_make_by_fbgemm, torch.float16, rows_dtype=torch.float32)


def make_half_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Makes a product of float32 rows with a weight stored in float16, on a CPU.

    The product reads half the memory, computes in float32 and has the least overhead. For one row
    it is twice as fast as make_linear in bfloat16 at the sizes of the bundled pair. Without fbgemm
    each product widens its weight first, which takes two to four times as long as float32.
    """
    if has_half_linear():
        return _make_by_fbgemm(weight, bias)
    narrow, own_bias = weight.half(), None if bias is None else bias.detach()
    return lambda x: linear(x, narrow.float(), own_bias)


def _make_plain(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    # Separate tensors: the caller may empty the module's parameter afterwards.
    own_weight, own_bias = weight.detach(), None if bias is None else bias.detach()
    if weight.device.type == "cpu" and weight.dtype.itemsize == 2:
        return lambda x: _multiply_narrow(x, own_weight, own_bias)
    return lambda x: linear(x, own_weight, own_bias)


def _multiply_narrow(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Multiplies in 16 bits on a processor that cannot. torch's own product reads the weight once a
    row; from five rows on it is slower than one in float32 with a widened weight."""
    if x.numel() <= _NARROW_ROWS * x.shape[-1]:
        return linear(x, weight, bias)
    wide_bias = None if bias is None else bias.float()
    if not _is_right(_make_by_onednn, torch.float32):
        return linear(x.float(), weight.float(), wide_bias).to(x.dtype)
    # By oneDNN, which gives a row the same bits in each place.
    multiply = torch.ops.mkldnn._linear_pointwise.default
    wide: torch.Tensor = multiply(x.float(), weight.float(), wide_bias, "none", [], "")
    return wide.to(x.dtype)


# torch.compile's CPU backend uses the same operators of MKL and oneDNN.


def _make_by_mkl(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), _MKL_ROWS)
    shape = weight.new_empty(()).expand(weight.shape)  # the operator reads only its shape
    multiply = torch.ops.mkl._mkl_linear.default
    return lambda x: multiply(x, packed, shape, bias, x.numel() // x.shape[-1])


def _make_by_onednn(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    multiply = torch.ops.mkldnn._linear_pointwise.default
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _TYPICAL_ROWS)
    return lambda x: multiply(x, packed, bias, "none", [], "")


def _make_by_fbgemm(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    multiply = torch.fbgemm_linear_fp16_weight_fp32_activation
    with warnings.catch_warnings():
        # Both warn once that torch will drop them in favour of an operator with eight times the
        # overhead; has_half_linear tries them.
        warnings.simplefilter("ignore", UserWarning)
        packed = torch.fbgemm_pack_gemm_matrix_fp16(weight.float().contiguous())
        multiply(weight.new_zeros(1, weight.shape[1], dtype=torch.float32), packed, bias)
    return lambda x: multiply(x, packed, bias)


def _tried(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a pseudo-random weight and rows."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(_TRIED_SHAPE, generator=generator).to(dtype)
    return weight, torch.randn(_TRIED_ROWS, _TRIED_SHAPE[1], generator=generator).to(dtype)


@functools.cache
@torch.inference_mode()
def _is_right(
    make: MakeLinear, dtype: torch.dtype, *, rows_dtype: torch.dtype | None = None
) -> bool:
    """Whether a form of product runs here and gives the numbers of a plain one. A library that is
    absent or lacks a feature of the processor raises RuntimeError (of which NotImplementedError is
    a kind) or AttributeError."""
    weight, rows = _tried(dtype)
    rows = rows.to(rows_dtype or dtype)
    try:
        found = make(weight)(rows)
    except (RuntimeError, AttributeError) as error:
        reason = str(error).strip().partition("\n")[0]
        _log.debug("no products of %s by %s here: %s", dtype, make, reason)
        return False
    if (problem := difference_of(found, rows.float() @ weight.float().T, dtype)) is not None:
        _log.warning("products of %s by %s are wrong here: %s", dtype, make, problem)
    return problem is None


@torch.inference_mode()
def _treats_rows_alike() -> bool:
    """Whether MKL's product gives rows the same bits whatever the number of rows beside them."""
    weight, rows = _tried(torch.float32)
    product = _make_by_mkl(weight)
    together = product(rows)
    return all(
        torch.equal(product(rows[first:end]), together[first:end])
        for first in range(_TRIED_ROWS)
        for end in range(first + 1, _TRIED_ROWS + 1)
    )
