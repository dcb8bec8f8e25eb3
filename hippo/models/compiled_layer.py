"""A decoder layer compiled ahead by TorchInductor, for steps of one sequence on a CPU.

One layer is compiled, with its weights as arguments, and called for every layer: they differ in
nothing else. So compiling costs the same for 2 layers as for 80, weights stay the ones that
prefills use, and one package is enough, in which rows (1 to 32) and cached length are left open.
Matrix products are the ordinary step's, oneDNN's, MKL's or fbgemm's by the form that the weight is
kept in (hippo.models.linear); what lies between them is fused, and no operator passes Python.

    hidden ─► norm ─► [qkv] ─► rotate, write to the cache ─► [attention] ─► [output] ─► add, norm
           ─► [gate, up] ─► silu, times ─► [down] ─► add          [ ]: a library's kernel

A package is a file made by AOTInductor (torch.export, torch._inductor.aoti_compile_and_package);
hippo.models.compiled_packages keeps them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import inspect
import json
import platform
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention, silu

from hippo.models.batch import MAX_GROUPED_ROWS
from hippo.models.cache import KeyValueCache
from hippo.models.fused import FusedStack, LayerShape
from hippo.models.linear import Form, kept_weight, make_in_form

Run = Callable[[list[torch.Tensor]], list[torch.Tensor]]
"""_Layer.forward's tensors; gives the new ``hidden`` alone, the cache is written in place."""

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, int], torch.Tensor]
"""``x @ weight.T + bias`` of so many columns, for which fbgemm's weight cannot be asked."""

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

    ``forms``: of the weights of query-key-value, output, gate-up and down.
    """

    def __init__(self, shape: LayerShape, forms: Sequence[Form]) -> None:
        super().__init__()
        self.shape = shape
        self.products = [_PRODUCTS[form] for form in forms]

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
        query_key_value, output, gate_and_up, down = self.products
        hidden_size = hidden.shape[1]
        num_kv, num_rotated = shape.num_kv_heads, shape.num_heads + shape.num_kv_heads
        num_qkv, num_gate_up = qkv_bias.shape[0], 2 * shape.intermediate_size
        normed = self._norm(hidden, input_norm)
        qkv = query_key_value(normed, qkv_weight, qkv_bias, num_qkv).float()
        heads = qkv.view(rows, num_rotated + num_kv, shape.head_dim)
        pairs = heads[:, :num_rotated].view(rows, num_rotated, shape.head_dim // 2, 2)
        real, imaginary = pairs[..., 0], pairs[..., 1]
        cosines, sines = rotary[..., 0], rotary[..., 1]
        rotated = torch.stack(
            (real * cosines - imaginary * sines, real * sines + imaginary * cosines), -1
        ).flatten(2)
        new = torch.stack((rotated[:, shape.num_heads :], heads[:, num_rotated:]))
        seen.index_copy_(2, places, new.transpose(1, 2).to(seen.dtype))
        query = rotated[:, : shape.num_heads].to(seen.dtype)
        query = query.reshape(rows, num_kv, shape.groups, shape.head_dim)
        attended = scaled_dot_product_attention(
            query.transpose(0, 1).reshape(num_kv, 1, rows * shape.groups, shape.head_dim),
            seen[0][:, None],
            seen[1][:, None],
            attn_mask=mask,
            scale=shape.scaling,
        )
        attended = attended.view(num_kv, rows, -1).transpose(0, 1).reshape(rows, -1)
        hidden = hidden + output(attended.to(hidden.dtype), output_weight, None, hidden_size)
        both = gate_and_up(self._norm(hidden, post_norm), gate_up_weight, None, num_gate_up)
        gate, up = both.chunk(2, -1)
        return hidden + down(silu(gate) * up, down_weight, None, hidden_size)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.shape.eps)
        return (x * scale).to(x.dtype) * weight


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """All that a layer's code depends on, but this module, torch and the processor."""

    shape: LayerShape
    hidden_size: int
    dtype: str  # of what passes from layer to layer
    forms: tuple[Form, ...]  # of the weights of query-key-value, output, gate-up and down
    num_threads: int
    cache_dtype: str
    cache_shape: tuple[int, ...]  # of a whole slot, [2, num_kv_heads, tokens, head_dim]
    cache_strides: tuple[int, ...]

    @classmethod
    def of(cls, stack: FusedStack, cache: KeyValueCache) -> LayerSpec:
        """That of a stack's layers, run as this process runs operations."""
        whole = cache.stretch(0, cache.shape.capacity)[0]
        norm = stack.layer_tensors(0)[0]
        return cls(
            shape=stack.layer_shape,
            hidden_size=norm.shape[0],
            dtype=str(norm.dtype).removeprefix("torch."),
            forms=stack.forms,
            num_threads=torch.get_num_threads(),
            cache_dtype=str(whole.dtype).removeprefix("torch."),
            cache_shape=tuple(whole.shape),
            cache_strides=tuple(whole.stride()),
        )

    @classmethod
    def from_json(cls, text: str) -> LayerSpec:
        """From ``to_json``."""
        given = json.loads(text)
        given["shape"] = LayerShape(**given["shape"])
        for name in ("forms", "cache_shape", "cache_strides"):
            given[name] = tuple(given[name])
        return cls(**given)

    def to_json(self) -> str:
        """For another process."""
        return json.dumps(asdict(self), sort_keys=True)

    def name(self) -> str:
        """A file's, which differs where the code does."""
        source = inspect.getsource(sys.modules[__name__])
        parts = (self.to_json(), source, str(MAX_GROUPED_ROWS), torch.__version__, _processor())
        digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
        return f"layer-{digest[:24]}.pt2"


def prepare_loading() -> None:
    """Imports and defines what ``load_layer`` needs: seconds, the first time."""
    importlib.import_module("torch._inductor.package")
    _define_product()


def check_compiler() -> None:
    """Raises RuntimeError where no C++ compiler is installed."""
    from torch._inductor import config

    names = [name for name in config.cpp.cxx if name]
    if not any(map(shutil.which, names)):
        raise RuntimeError(f"no C++ compiler is installed ({', '.join(names)})")


def load_layer(path: Path) -> Run:
    """The package's code. Raises what torch and the file system raise."""
    from torch._inductor import config

    _define_product()
    with config.patch(_INDUCTOR_OPTIONS):
        # Single-threaded: the device thread alone calls, and a step waits for no lock.
        package: Any = torch._inductor.aoti_load_package(str(path), run_single_threaded=True)
    run: Run = package.loader.run
    return run


def compile_layer(spec: LayerSpec, path: Path) -> str:
    """Makes a package at ``path`` and gives that; raises what torch and the compiler raise."""
    _define_product()
    shape, num_places = spec.shape, spec.cache_shape[2]
    num_rows, num_tokens = 6, 24  # an example; CompiledSteps' check tries one row as well
    weights = _example_weights(spec)
    cache_dtype: torch.dtype = getattr(torch, spec.cache_dtype)
    whole = torch.empty_strided(spec.cache_shape, spec.cache_strides, dtype=cache_dtype)
    given = (
        torch.zeros(num_rows, spec.hidden_size, dtype=weights[0].dtype),
        whole[:, :, :num_tokens].zero_(),
        torch.zeros(num_rows, 1, shape.head_dim // 2, 2),
        torch.arange(num_rows),
        torch.zeros(num_rows * shape.groups, num_tokens, dtype=cache_dtype),
    )
    tokens = torch.export.Dim("tokens", min=2, max=num_places - 1)
    rows = torch.export.Dim("rows", min=1, max=MAX_GROUPED_ROWS)
    open_mask = {0: shape.groups * rows, 1: tokens}
    dims = ({0: rows}, {2: tokens}, {0: rows}, {0: rows}, open_mask, *[None] * len(weights))
    layer = _Layer(shape, spec.forms)
    with torch.no_grad(), _lowered_product(spec.num_threads), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own deprecations, of what it calls itself
        exported = torch.export.export(layer, (*given, *weights), dynamic_shapes=dims)
        made: str = torch._inductor.aoti_compile_and_package(exported, package_path=str(path))
    return made


def _example_weights(spec: LayerSpec) -> tuple[torch.Tensor, ...]:
    """Weights like FusedStack.layer_tensors'."""
    shape, hidden_size = spec.shape, spec.hidden_size
    dtype: torch.dtype = getattr(torch, spec.dtype)
    num_qkv = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    qkv, output, gate_up, down = (
        kept_weight(make_in_form(form, torch.zeros(num_outputs, num_inputs, dtype=dtype)))
        for form, num_outputs, num_inputs in zip(
            spec.forms,
            (num_qkv, hidden_size, 2 * shape.intermediate_size, hidden_size),
            (hidden_size, shape.num_heads * shape.head_dim, hidden_size, shape.intermediate_size),
            strict=True,
        )
    )
    norm, bias = torch.zeros(hidden_size, dtype=dtype), torch.zeros(num_qkv, dtype=dtype)
    return norm, qkv, bias, output, norm.clone(), gate_up, down


def _half_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, num_columns: int
) -> torch.Tensor:
    """fbgemm's; AOTInductor calls it from the code it makes."""
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


def _transposed_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, _num_columns: int
) -> torch.Tensor:
    """MKL's; AOTInductor calls it from the code it makes."""
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


_PRODUCTS: dict[Form, Product] = {
    "packed": _packed_product,
    "transposed": _transposed_product,
    "half": _half_product,
}


@functools.cache
def _define_product() -> Any:
    """``hippo::packed_linear``: oneDNN's product, under a name of our own: TorchInductor takes the
    original only with a weight that is a constant of the graph."""
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
def _lowered_product(num_threads: int) -> Iterator[None]:
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
        with config.patch({**_INDUCTOR_OPTIONS, "cpp.threads": num_threads}):
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
