"""The rows of a quantiser's layers as quantised numbers, in one form for all quantisers."""

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from hippo.models.quantized.awq import AwqLayer

TILE_ROWS, TILE_COLUMNS = 16, 64  # rows of a weight and columns, for one warp's load
GROUP = 64  # columns that share a scale in 4 bits; bitsandbytes' default


@dataclass(frozen=True, slots=True)
class QuantisedRows:
    """The rows of a weight ``[out, in]`` as quantised numbers.

    ``codes`` are uint8: in 4 bits ``[out, in / 2]``, the first of two numbers in the high half; in
    8 bits ``[out, in]``, the number plus 128. ``scales`` are ``[out, in / 64]`` in float16 (4 bits)
    or ``[out]`` in float32. ``values`` are the 16 numbers that 4-bit codes stand for, float32; None
    in 8 bits. ``zeros``, uint8 ``[out, in / 64]``, are subtracted from the values before scaling.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    values: torch.Tensor | None
    bias: torch.Tensor | None
    zeros: torch.Tensor | None = None

    @property
    def bits(self) -> int:
        """4 or 8."""
        return 8 if self.values is None else 4

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the weight."""
        return self.codes.shape[0], self.codes.shape[1] * 8 // self.bits

    def reordered(self, reorder: Callable[[torch.Tensor], torch.Tensor]) -> "QuantisedRows":
        """Returns the rows in another order."""
        bias = None if self.bias is None else reorder(self.bias)
        zeros = None if self.zeros is None else reorder(self.zeros)
        return QuantisedRows(reorder(self.codes), reorder(self.scales), self.values, bias, zeros)

    def plain(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the weight ``[out, in]``, float32, from ``values`` rounded to ``dtype`` as the
        kernel has them."""
        if self.values is None:
            return (self.codes.float() - 128) * self.scales[:, None]
        codes = torch.stack((self.codes >> 4, self.codes & 15), 2).view(*self.scales.shape, GROUP)
        values = self.values.to(dtype).float()[codes.long()]
        if self.zeros is not None:
            values -= self.zeros[:, :, None]
        return (values * self.scales[:, :, None].float()).flatten(1)


def quantised_rows(module: Any) -> QuantisedRows | None:
    """Returns the rows of a quantiser's module: of bitsandbytes (nf4, fp4), torchao (int8),
    compressed-tensors (int4, int8) or AWQ; None for another module, and for sizes or settings that
    the kernel does not have."""
    weight: Any = getattr(module, "weight", None)
    if isinstance(module, AwqLayer):
        return _awq_rows(module)
    if has_no_product(module):
        return _compressed_rows(module)
    state = getattr(weight, "quant_state", None)
    if state is not None and state.blocksize == GROUP:
        return _four_bit_rows(module, state)
    if getattr(weight, "act_quant_kwargs", 1) is None and weight.qdata.dtype == torch.int8:
        height, width = weight.shape
        is_by_rows = tuple(weight.block_size) == (1, width)
        has_more = getattr(weight, "act_pre_scale", None) is not None
        has_more |= weight.zero_point is not None and bool(weight.zero_point.any())
        if has_more or not is_by_rows or width % TILE_COLUMNS or height % TILE_ROWS:
            return None
        codes = weight.qdata.view(torch.uint8) ^ 128
        return QuantisedRows(codes, weight.scale.view(height).float(), None, module.bias)
    return None


def has_no_product(module: Any) -> bool:
    """Whether a module is a layer of AWQ or one of compressed-tensors with integers, which only run
    here."""
    if isinstance(module, AwqLayer):
        return True
    weight: Any = getattr(module, "weight", None)
    is_int8 = weight is not None and weight.dtype == torch.int8
    return hasattr(module, "weight_packed") or (is_int8 and hasattr(module, "weight_scale"))


def _four_bit_rows(module: Any, state: Any) -> QuantisedRows | None:
    """Returns the rows of a layer of bitsandbytes, whose scales may themselves be quantised."""
    height, width = state.shape
    absmax = state.absmax
    if state.nested:
        functional: Any = importlib.import_module("bitsandbytes.functional")
        absmax = functional.dequantize_blockwise(absmax, state.state2) + state.offset
    if width % GROUP or height % TILE_ROWS:
        return None
    return QuantisedRows(
        module.weight.data.view(torch.uint8).view(height, width // 2),
        absmax.view(height, width // GROUP).half(),
        state.code.float(),
        module.bias,
    )


def _compressed_rows(module: Any) -> QuantisedRows:
    """Returns the rows of a layer of compressed-tensors in a form that find_quantization keeps:
    symmetric, in 8 bits with a scale for each row, or in 4 bits with one for 64 * n columns."""
    height, width = module.out_features, module.in_features
    if not hasattr(module, "weight_packed"):
        codes = module.weight.data.view(torch.uint8) ^ 128
        return QuantisedRows(codes, module.weight_scale.view(height).float(), None, module.bias)
    codes = module.weight_packed.data.view(torch.uint8).view(height, width // 2)
    scales = module.weight_scale
    scales = scales.repeat_interleave(width // GROUP // scales.shape[1], 1)
    return QuantisedRows(
        (codes << 4) | (codes >> 4),  # the first number of a byte is in the low half there
        scales.half(),
        torch.arange(-8.0, 8.0, device=codes.device),
        module.bias,
    )


def _awq_rows(module: AwqLayer) -> QuantisedRows:
    """Returns the rows of a layer of AWQ whose groups have 64 * n columns."""
    numbers, zeros, scales = module.numbers()
    repeats = module.in_features // GROUP // scales.shape[1]
    return QuantisedRows(
        (numbers[:, 0::2] << 4) | numbers[:, 1::2],
        scales.repeat_interleave(repeats, 1),
        torch.arange(16.0, device=scales.device),
        module.bias,
        zeros.repeat_interleave(repeats, 1),
    )


def decompress(modules: Iterable[Any], dtype: torch.dtype) -> None:
    """Makes plain layers of those that have no products of their own."""
    for module in filter(has_no_product, modules):
        if isinstance(module, AwqLayer):
            module.decompress(dtype)
            continue
        base: Any = importlib.import_module("compressed_tensors.compressors.base")
        base.decompress_module(module, leave_decompressed=False)
        module.to(dtype)
