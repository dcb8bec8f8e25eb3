"""Products of few rows with 4-bit and 8-bit weights on a GPU, at the speed of reading the weights.

A step has one row for each token that it verifies. bitsandbytes' and torchao's products of several
rows unpack the whole weight first, so that on an H100 a step of eight rows takes 2.4 times as long
as one of a single row (nf4), or 3.8 times as long as with plain weights (int8). The kernel here
unpacks weights in registers, right before tensor cores multiply them, and takes about as long for
8 rows as for one, and up to 1.7 times as long for 32. A row's result does not depend, to the last
bit, on the number of rows, up to six times 32.

The quantised numbers stay the quantiser's; only their order in memory changes. Products of
more rows, as in prefills, unpack the weight and use torch's product.
"""

import contextlib
import functools
import importlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hippo.models.products.linear import Linear
from hippo.models.quantized.awq import AwqLayer
from hippo.models.quantized.packed_kernel import SOURCE
from hippo.models.quantized.quantised_rows import (
    GROUP,
    TILE_COLUMNS,
    TILE_ROWS,
    QuantisedRows,
    decompress,
    quantised_rows,
)

_log = logging.getLogger(__name__)

_MOST_ROWS = 32  # that the kernel takes in a call
# On an H100 a call takes 181 µs for gate and up of a 72B in nf4, and the product of 512 rows with
# the unpacked weight takes 1,110 µs, as six calls (docs/gpu.md).
_FEW_ROWS = 6 * _MOST_ROWS
_WARPS = 8
_ROWS_EACH = 32  # rows of a weight for one block of threads; 64 if there are enough blocks
SHAPES = ((1, 2), (1, 4), (2, 2), (2, 4), (4, 2))  # numbers of 8 rows, and of tile rows
_TRIED_SHAPE = 64, 640  # a weight to try the kernels: two warps have two of ten tiles each
_LARGEST_DIFFERENCE = 0.01  # rounding to 16 bits makes less, a wrong place or factor more
_LEAST_CAPABILITY = (8, 0)  # tensor cores that multiply bfloat16 by mma.m16n8k16


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns codes (see QuantisedRows) in the order in which the kernel's threads read them.

    A warp multiplies tiles of 16 rows and 64 columns in four steps of 16 columns. Of such a step,
    thread ``4 * g + t`` takes rows ``g`` and ``g + 8``, and of them four columns (PTX ISA,
    mma.m16n8k16, matrix A). Which columns a step has does not matter as long as the other factor
    has the same, so that a thread takes 16 adjacent columns in its four steps.
    """
    height, width = codes.shape
    each = bits // 4  # bytes of two adjacent columns
    num_tiles = width // (16 * each * 2)
    # tile row, half, g, tile column, t, step, pair, byte
    view = codes.view(height // TILE_ROWS, 2, 8, num_tiles, 4, 4, 2, each)
    return view.permute(0, 3, 2, 4, 5, 6, 1, 7).contiguous().view(-1)


def pack_scales(scales: torch.Tensor) -> torch.Tensor:
    """Returns scales or zeros ``[out, groups]`` as ``[tile rows, groups, 8, 2]``: the scales of
    rows ``g`` and ``g + 8`` side by side."""
    height, num_groups = scales.shape
    view = scales.view(height // TILE_ROWS, 2, 8, num_groups)
    return view.permute(0, 3, 2, 1).contiguous()


def make_packed(
    modules: Sequence[Any],
    dtype: torch.dtype,
    reorders: Sequence[Callable[[torch.Tensor], torch.Tensor]] = (),
) -> Linear | None:
    """Makes one product of a quantiser's modules, whose results are joined, for rows of ``dtype``.

    ``reorders`` change the order of the rows of the first modules. Returns None if the kernels are
    not for these modules, for this dtype or for this device; else the modules' weights are removed.
    """
    stored = itertools.chain(modules[0].parameters(), modules[0].buffers())
    device = next((each.device for each in stored), torch.device("cpu"))
    if dtype.itemsize != 2 or not has_kernels(device):
        return None
    parts = list(filter(None, map(quantised_rows, modules)))
    if len(parts) < len(modules) or not _can_join(parts):
        _log_once(f"layers of {type(modules[0]).__name__}")
        decompress(modules, dtype)
        return None
    kernels = make_kernels(device, parts[0].bits, dtype, parts[0].zeros is not None)
    if kernels is None:
        return None
    for index, reorder in enumerate(reorders):
        parts[index] = parts[index].reordered(reorder)
    product = PackedLinear(parts, dtype, kernels)
    for module in modules:
        for name, _ in list(module.named_parameters(recurse=False)):
            delattr(module, name)
        if isinstance(module, AwqLayer):
            module.drop_numbers()
        module.quant_state = None  # bitsandbytes' modules hold their scales a second time
    del parts
    torch.cuda.empty_cache()  # see hippo.models.runners.layers
    return product


def _can_join(parts: Sequence[QuantisedRows]) -> bool:
    """Whether rows are of one form, and as many as blocks of threads can share."""
    first = parts[0]
    kind = first.bits, first.shape[1], first.bias is None, first.zeros is None
    is_one_form = all(
        (part.bits, part.shape[1], part.bias is None, part.zeros is None) == kind
        and (part.values is None or first.values is None or torch.equal(part.values, first.values))
        for part in parts
    )
    return is_one_form and sum(part.shape[0] for part in parts) % _ROWS_EACH == 0


@functools.cache
def _log_once(layers: str) -> None:
    _log.info(
        "%s are not all in a form that the kernels have, and run unpacked or by their own package",
        layers,
    )


def can_pack(device: torch.device, bits: int, dtype: torch.dtype, has_zeros: bool) -> bool:
    """Whether layers with weights of ``bits``, and zero points, run by the kernels for rows of
    ``dtype``."""
    return (
        has_kernels(device)
        and dtype.itemsize == 2
        and make_kernels(device, bits, dtype, has_zeros) is not None
    )


def has_kernels(device: torch.device) -> bool:
    """Whether the kernels run on a device."""
    return (
        device.type == "cuda"
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY
    )


@dataclass(frozen=True, slots=True)
class Kernels:
    """Compiled kernels: ``few`` by numbers of 8 rows and of tiles for one block of threads."""

    few: dict[tuple[int, int], Any]
    unpack: Any


@functools.cache
def make_kernels(
    device: torch.device, bits: int, dtype: torch.dtype, has_zeros: bool
) -> Kernels | None:
    """Compiles the kernels for the device by NVRTC, which comes with torch, and tries them; logs
    the reason and returns None if they cannot be compiled or give wrong numbers."""
    try:
        # torch asks for CUDA's headers, which the source does not include.
        with torch.cuda.device(device), _cuda_home():
            few = {
                shape: _compiled("multiply", source_of(bits, dtype, *shape, has_zeros=has_zeros))
                for shape in SHAPES
            }
            source = source_of(bits, dtype, *SHAPES[0], has_zeros=has_zeros)
            kernels = Kernels(few, _compiled("unpack", source))
            is_right = are_right(kernels, tried_rows(device, bits, has_zeros), dtype)
    # torch compiles by a private function, which a later version may rename.
    except (ImportError, AttributeError, RuntimeError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        _log.warning("kernels for quantised layers do not run here, steps are slow: %s", reason)
        return None
    return kernels if is_right else None


def tried_rows(device: torch.device, bits: int, has_zeros: bool) -> QuantisedRows:
    """Returns pseudo-random rows to try kernels with."""
    generator = torch.Generator().manual_seed(0)
    (height, width), is_short = _TRIED_SHAPE, bits == 4

    def numbers(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(most, shape, dtype=torch.uint8, generator=generator).to(device)

    places = (height, width // GROUP) if is_short else (height,)
    scales = (numbers(256, *places) + 16.0) / 4096
    return QuantisedRows(
        numbers(256, height, width * bits // 8),
        scales.half() if is_short else scales,
        torch.arange(-8.0, 8.0, device=device) if is_short else None,
        numbers(16, height).float(),
        numbers(16, *places) if has_zeros else None,
    )


def are_right(kernels: Kernels, rows: QuantisedRows, dtype: torch.dtype) -> bool:
    """Whether all kernels give the numbers of the plain weight; logs an error if not. No kernel has
    run on every kind of GPU."""
    found = list(_differences(kernels, rows, dtype))
    is_right = all(each < _LARGEST_DIFFERENCE for each in found)
    if not is_right:
        _log.error(
            "kernels for quantised layers are wrong on this GPU and not used; please report it "
            "with the GPU's name and these differences: %s",
            ", ".join(f"{each:.2g}" for each in found),
        )
    return is_right


def _differences(kernels: Kernels, rows: QuantisedRows, dtype: torch.dtype) -> Iterator[float]:
    """Yields the relative differences of each kernel's results."""
    weight, product = rows.plain(dtype), PackedLinear([rows], dtype, kernels)
    height, width = rows.shape
    yield _difference(product.unpacked(0, height), weight)
    for num_eights, num_tiles in kernels.few:
        numbers = torch.arange(8 * num_eights * width, device=weight.device)
        x = (numbers % 31 - 15).view(-1, width).to(dtype)  # exact in 16 bits
        expected = x.float() @ weight.T
        if rows.bias is not None:
            expected += rows.bias
        product.num_tiles = num_tiles
        yield _difference(product(x), expected)


@contextlib.contextmanager
def _cuda_home() -> Iterator[None]:
    """Names a folder for CUDA's headers meanwhile if there is none."""
    extension: Any = importlib.import_module("torch.utils.cpp_extension")
    before = extension.CUDA_HOME
    extension.CUDA_HOME = before or "/usr"
    try:
        yield
    finally:
        extension.CUDA_HOME = before


def _compiled(name: str, source: str) -> Any:
    compile_kernel: Any = torch.cuda._compile_kernel
    return compile_kernel(source, name)


def source_of(
    bits: int, dtype: torch.dtype, num_eights: int, num_tiles: int, *, has_zeros: bool
) -> str:
    """Returns the source for rows of ``dtype``, at most ``8 * num_eights`` of them."""
    kind = {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    # Loads of 16 bytes that a thread has under way: 8, or 2 where registers are scarce.
    num_loads = 2 if bits == 4 and num_eights == 4 else 8
    ahead = max(1, num_loads // num_tiles // (bits // 4))
    settings = {"BITS": bits, "EIGHTS": num_eights, "TILES": num_tiles, "AHEAD": ahead}
    settings |= {"IS_BFLOAT": int(dtype == torch.bfloat16), "HAS_ZEROS": int(has_zeros)}
    lines = [f"#define {name} {value}" for name, value in settings.items()]
    # Older versions of torch write more before the first line.
    return "\n".join(["", *lines, f'#define KIND "{kind}"', SOURCE])


class PackedLinear:
    """Maps ``x`` ``[rows, in]`` to ``x @ weight.T + bias`` ``[rows, out]``, in ``x``'s dtype."""

    def __init__(
        self, parts: Sequence[QuantisedRows], dtype: torch.dtype, kernels: Kernels
    ) -> None:
        device = parts[0].codes.device
        self._bits, self._kernels, self._dtype = parts[0].bits, kernels, dtype
        self._heights = [part.shape[0] for part in parts]
        self._height, self._width = sum(self._heights), parts[0].shape[1]
        self._packed = torch.cat([pack(part.codes, part.bits) for part in parts])
        scales = [part.scales if self._bits == 8 else pack_scales(part.scales) for part in parts]
        self._scales = torch.cat(scales)
        biases = [part.bias for part in parts if part.bias is not None]
        self._bias = torch.cat(biases).to(dtype) if biases else None
        self._no_bias = torch.empty(0, dtype=dtype, device=device)
        zeros = [pack_scales(part.zeros) for part in parts if part.zeros is not None]
        self._zeros = torch.cat(zeros) if zeros else self._no_bias
        self._table = self._no_bias
        if parts[0].values is not None:
            self._table = value_pairs(parts[0].values.to(device), dtype)
        num_units = torch.cuda.get_device_properties(device).multi_processor_count
        has_many = self._height % 64 == 0 and self._height // 64 >= 2 * num_units
        self.num_tiles = 4 if has_many else 2  # for one block of threads

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the product."""
        rows = x.reshape(-1, self._width)
        product = x.new_empty(rows.shape[0], self._height)
        if rows.shape[0] > _FEW_ROWS:
            self._many(rows, product)
        else:
            rows = rows.contiguous()
            for first in range(0, rows.shape[0], _MOST_ROWS):
                part = slice(first, first + _MOST_ROWS)
                self._few(rows[part], product[part])
        return product.view(*x.shape[:-1], self._height)

    def _few(self, x: torch.Tensor, product: torch.Tensor) -> None:
        count = x.shape[0]
        eights = 1 if count <= 8 else 2 if count <= 16 else 4
        tiles = 2 if eights == 4 else self.num_tiles
        bias = self._no_bias if self._bias is None else self._bias
        self._kernels.few[eights, tiles](
            grid=(self._height // (TILE_ROWS * tiles), 1, 1),
            block=(32 * _WARPS, 1, 1),
            args=[
                self._packed, self._scales, self._zeros, self._table, bias, x, product, count,
                self._height, self._width,
            ],
        )  # fmt: skip

    def _many(self, x: torch.Tensor, product: torch.Tensor) -> None:
        """Unpacks the parts one after the other, so that one of them is in memory."""
        first = 0
        for height in self._heights:
            weight = self.unpacked(first, height)
            torch.mm(x, weight.T, out=product[:, first : first + height])
            first += height
        if self._bias is not None:
            product.add_(self._bias)

    def unpacked(self, first: int, height: int) -> torch.Tensor:
        """Returns rows of the weight, ``[height, in]``."""
        weight = torch.empty(height, self._width, dtype=self._dtype, device=self._packed.device)
        num_tiles = height // TILE_ROWS * (self._width // TILE_COLUMNS)
        self._kernels.unpack(
            grid=(-(-num_tiles // _WARPS), 1, 1),
            block=(32 * _WARPS, 1, 1),
            args=[
                self._packed, self._scales, self._zeros, self._table, weight,
                first // TILE_ROWS, num_tiles, self._width,
            ],
        )  # fmt: skip
        return weight


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the relative difference; nan if ``found`` has numbers that are not finite."""
    return float((found.float() - expected).norm() / expected.norm())


def value_pairs(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns what each byte of two codes stands for: ``[256, 2]``, the first number first."""
    rounded = values.to(dtype)
    return torch.stack((rounded.repeat_interleave(16), rounded.repeat(16)), 1).contiguous()
