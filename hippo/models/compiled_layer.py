"""Decoder layers compiled ahead by TorchInductor, for steps of one sequence on a CPU.

One layer is compiled, with its weights as arguments, and called for every layer: they differ in
nothing else. So compiling costs the same for 2 layers as for 80, the packed weights stay the ones
that prefills use, and one package is enough, in which rows (1 to 32) and cached length are left
open. Matrix products are the ordinary step's, oneDNN's or with float16 weights fbgemm's; what lies
between them is fused, and no operator passes Python.

    hidden ─► norm ─► [qkv] ─► rotate, write to the cache ─► [attention] ─► [output] ─► add, norm
           ─► [gate, up] ─► silu, times ─► [down] ─► add          [ ]: a library's kernel

A package is a file made by AOTInductor (torch.export, torch._inductor.aoti_compile_and_package). It
is kept under a name that says all it depends on, and a later start only loads it. Of services that
start together and need the same one, one makes it, and the others wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import inspect
import json
import logging
import os
import platform
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch.nn.functional import scaled_dot_product_attention, silu

from hippo.models.batch import MAX_GROUPED_ROWS
from hippo.models.cache import KeyValueCache
from hippo.models.fused import FusedStack, LayerShape

_log = logging.getLogger(__name__)

Run = Callable[[list[torch.Tensor]], list[torch.Tensor]]
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, int], torch.Tensor]

_PATIENCE_S = 120.0  # for another process that makes what this one needs too
_MOST_KEPT = 64  # packages in a folder, of 2 MB each
_PARTIAL = ".making-"  # what a folder is called in which a package is made
_ABANDONED_S = 3600.0

# What the processor can do is asked of the processor alone, not also by compiling and loading four
# programs, to load a package as well; and headers are not compiled ahead for a file or two: either
# took as long as a layer.
_INDUCTOR_OPTIONS = {
    "compile_threads": 1,
    "cpp.vec_isa_ok": True,
    "aot_inductor.precompile_headers": False,
}


class _Layer(torch.nn.Module):
    """hippo.models.fused's layer, in operations that TorchInductor can fuse.

    ``product`` gives ``x @ weight.T + bias`` of so many columns, for which a packed weight cannot
    be asked.
    """

    def __init__(self, shape: LayerShape, product: Product) -> None:
        super().__init__()
        self.shape = shape
        self.product = product

    def forward(
        self,
        hidden: torch.Tensor,  # [rows, hidden_size]
        seen: torch.Tensor,  # [2, num_kv_heads, tokens, head_dim], of which the rows are the last
        rotary: torch.Tensor,  # [rows, 1, head_dim / 2, 2]
        places: torch.Tensor,  # int64 [rows]
        mask: torch.Tensor,  # [rows * groups, tokens]
        input_norm: torch.Tensor,
        qkv_weight: torch.Tensor,
        qkv_bias: torch.Tensor,
        output_weight: torch.Tensor,
        post_norm: torch.Tensor,
        gate_up_weight: torch.Tensor,
        down_weight: torch.Tensor,
    ) -> torch.Tensor:
        shape, rows = self.shape, hidden.shape[0]
        product, hidden_size = self.product, hidden.shape[1]
        num_kv, num_rotated = shape.num_kv_heads, shape.num_heads + shape.num_kv_heads
        num_qkv, num_gate_up = qkv_bias.shape[0], 2 * shape.intermediate_size
        qkv = product(self._norm(hidden, input_norm), qkv_weight, qkv_bias, num_qkv).float()
        heads = qkv.view(rows, num_rotated + num_kv, shape.head_dim)
        pairs = heads[:, :num_rotated].view(rows, num_rotated, shape.head_dim // 2, 2)
        real, imaginary = pairs[..., 0], pairs[..., 1]
        cosines, sines = rotary[..., 0], rotary[..., 1]
        rotated = torch.stack(
            (real * cosines - imaginary * sines, real * sines + imaginary * cosines), -1
        ).flatten(2)
        new = torch.stack((rotated[:, shape.num_heads :], heads[:, num_rotated:]))
        seen.index_copy_(2, places, new.transpose(1, 2))
        query = rotated[:, : shape.num_heads].reshape(rows, num_kv, shape.groups, shape.head_dim)
        attended = scaled_dot_product_attention(
            query.transpose(0, 1).reshape(num_kv, 1, rows * shape.groups, shape.head_dim),
            seen[0][:, None],
            seen[1][:, None],
            attn_mask=mask,
            scale=shape.scaling,
        )
        attended = attended.view(num_kv, rows, -1).transpose(0, 1).reshape(rows, -1)
        hidden = hidden + product(attended.to(hidden.dtype), output_weight, None, hidden_size)
        both = product(self._norm(hidden, post_norm), gate_up_weight, None, num_gate_up)
        gate, up = both.chunk(2, -1)
        return hidden + product(silu(gate) * up, down_weight, None, hidden_size)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.shape.eps)
        return (x * scale).to(x.dtype) * weight


@dataclass(frozen=True, slots=True)
class _Key:
    """All that a package depends on."""

    source: str  # of this module
    most_rows: int
    torch_version: str
    processor: str
    layer: dict[str, Any]
    weights: tuple[tuple[int, ...], ...]
    dtype: str
    has_half_weights: bool
    num_threads: int
    cache_shape: tuple[int, ...]
    cache_strides: tuple[int, ...]

    def name(self) -> str:
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return f"layer-{digest[:24]}.pt2"


def load_or_compile(stack: FusedStack, cache: KeyValueCache, folder: Path) -> Run:
    """The package from ``folder``, or made and kept there.

    It takes _Layer.forward's tensors and gives the new ``hidden`` alone; the cache is written in
    place. Raises what torch, the compiler or the file system raise.
    """
    _define_product()
    path = folder / _key(stack, cache).name()
    if run := _load_kept(path):
        return run
    _check_compiler()
    folder.mkdir(parents=True, exist_ok=True)
    with _making(path):
        if run := _load_kept(path):
            return run  # another process made it meanwhile
        _make(stack, cache, path)
    return _load(path)


def _key(stack: FusedStack, cache: KeyValueCache) -> _Key:
    whole = cache.stretch(0, cache.shape.capacity)[0]
    weights = stack.layer_tensors(0)
    return _Key(
        source=inspect.getsource(sys.modules[__name__]),
        most_rows=MAX_GROUPED_ROWS,
        torch_version=torch.__version__,
        processor=_processor(),
        layer=asdict(stack.layer_shape),
        weights=tuple(tuple(weight.shape) for weight in weights),
        dtype=str(weights[0].dtype),
        has_half_weights=stack.has_half_weights,
        num_threads=torch.get_num_threads(),
        cache_shape=tuple(whole.shape),
        cache_strides=tuple(whole.stride()),
    )


def _load_kept(path: Path) -> Run | None:
    if not path.exists():
        return None
    try:
        run = _load(path)
    except Exception as error:  # a damaged file: made anew
        _log.warning("%s cannot be loaded and is compiled again: %s", path, error)
        path.unlink(missing_ok=True)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # what is in use is not swept
    return run


def _make(stack: FusedStack, cache: KeyValueCache, path: Path) -> None:
    _log.info("compiling a layer; this takes a while once, %s keeps it", path.parent)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=_PARTIAL) as partial:
        made = _compile(stack, cache, Path(partial) / "layer.pt2")
        os.replace(made, path)  # whole or not at all: another service may compile the same
    _log.info("compiled a layer in %.0f s", time.monotonic() - began)
    _sweep(path.parent)


def _sweep(folder: Path) -> None:
    """Removes the packages that have not been loaded for longest, beyond _MOST_KEPT, and what
    processes left that were ended while they compiled."""
    with contextlib.suppress(OSError):
        packages = sorted(folder.glob("layer-*.pt2"), key=lambda package: package.stat().st_mtime)
        for package in packages[:-_MOST_KEPT]:
            package.unlink()
        for partial in folder.glob(f"{_PARTIAL}*"):
            if partial.stat().st_mtime < time.time() - _ABANDONED_S:
                shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _making(path: Path) -> Iterator[None]:
    """Waits, for a while, until no other process makes the package; none does till the block ends,
    unless one took longer."""
    lock_path = path.with_suffix(".lock")
    deadline = time.monotonic() + _PATIENCE_S
    with lock_path.open("w") as lock:
        if not (is_ours := _locked(lock)):
            _log.info("another process compiles the same layer; waiting for it")
        while not is_ours and time.monotonic() < deadline:
            time.sleep(0.1)
            is_ours = _locked(lock)
        try:
            yield
        finally:
            if is_ours:  # who waited finds the package, or makes it where this process could not
                lock_path.unlink(missing_ok=True)


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _check_compiler() -> None:
    """Raises RuntimeError: without a compiler, and before all that leads up to it is imported."""
    from torch._inductor import config

    names = [name for name in config.cpp.cxx if name]
    if not any(map(shutil.which, names)):
        raise RuntimeError(f"no C++ compiler is installed ({', '.join(names)})")


def _load(path: Path) -> Run:
    from torch._inductor import config

    with config.patch(_INDUCTOR_OPTIONS):
        # Single-threaded: the device thread alone calls, and a step waits for no lock.
        package: Any = torch._inductor.aoti_load_package(str(path), run_single_threaded=True)
    run: Run = package.loader.run
    return run


def _compile(stack: FusedStack, cache: KeyValueCache, path: Path) -> str:
    shape = stack.layer_shape
    num_rows, num_tokens = 6, 24  # an example; CompiledSteps' check tries one row as well
    weights = stack.layer_tensors(0)
    given = (
        torch.zeros(num_rows, weights[0].shape[0], dtype=weights[0].dtype),
        cache.stretch(0, num_tokens)[0],
        torch.zeros(num_rows, 1, shape.head_dim // 2, 2),
        torch.arange(num_rows),
        torch.zeros(num_rows * shape.groups, num_tokens),
    )
    tokens = torch.export.Dim("tokens", min=2, max=cache.shape.capacity - 1)
    rows = torch.export.Dim("rows", min=1, max=MAX_GROUPED_ROWS)
    open_mask = {0: shape.groups * rows, 1: tokens}
    dims = ({0: rows}, {2: tokens}, {0: rows}, {0: rows}, open_mask, *[None] * len(weights))
    layer = _Layer(shape, _half_product if stack.has_half_weights else _packed_product)
    with torch.no_grad(), _lowered_product(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own deprecations, of what it calls itself
        exported = torch.export.export(layer, (*given, *weights), dynamic_shapes=dims)
        made: str = torch._inductor.aoti_compile_and_package(exported, package_path=str(path))
    return made


def _half_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, num_columns: int
) -> torch.Tensor:
    """fbgemm's, as make_half_linear packs for it; AOTInductor calls it from the code it makes."""
    result: torch.Tensor = torch.ops._quantized.wrapped_fbgemm_linear_fp16_weight(
        x, weight, bias, num_columns
    )
    return result


def _packed_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, _num_columns: int
) -> torch.Tensor:
    """oneDNN's; its packed weights have their shapes still."""
    result: torch.Tensor = torch.ops.hippo.packed_linear(x, weight, bias)
    return result


@functools.cache
def _define_product() -> Any:
    """``hippo::packed_linear``: oneDNN's product, as make_linear packs for it, under a name of our
    own: TorchInductor takes the original only with a weight that is a constant of the graph."""
    library: Any = torch.library.Library("hippo", "DEF")  # type: ignore[no-untyped-call]
    library.define("packed_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
    library.impl("packed_linear", _product, "CPU")
    library.impl("packed_linear", _product, "MkldnnCPU")
    torch.library.register_fake("hippo::packed_linear", _fake_product, lib=library)
    return library


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(
        x, weight, bias, "none", [], ""
    )
    return result


def _fake_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@contextlib.contextmanager
def _lowered_product() -> Iterator[None]:
    """TorchInductor calls oneDNN for our product from the code that it makes."""
    from torch._inductor import config, ir, lowering, mkldnn_ir

    def lower(x: Any, weight: Any, bias: Any) -> Any:
        x = ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(x))
        num_rows, _ = x.get_size()
        layout = ir.FixedLayout(x.get_device(), x.get_dtype(), [num_rows, weight.get_size()[0]])
        # The packed weight is an argument of the graph, and opaque: nothing may be asked of it.
        inputs = [x, weight.data.data]
        constants: list[Any] = ["none", [-1], ""]
        if bias is None:
            constants.insert(0, None)
        else:
            inputs.append(ir.ExternKernel.realize_input(bias))
        return ir.TensorBox.create(
            mkldnn_ir.LinearUnary(layout=layout, inputs=inputs, constant_args=constants)
        )

    product = torch.ops.hippo.packed_linear.default
    lowering.register_lowering(product, type_promotion_kind=None)(lower)
    try:
        with config.patch({**_INDUCTOR_OPTIONS, "cpp.threads": torch.get_num_threads()}):
            yield
    finally:
        lowering.lowerings.pop(product, None)


def _processor() -> str:
    """What code made for this processor depends on."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        named = ("model name", "flags", "Features", "CPU part")
        return "\n".join(sorted({line for line in lines if line.startswith(named)}))
    return f"{platform.machine()} {platform.processor()}"
