"""Times of the products of one layer with weights in several forms, by number of rows, on a GPU."""

import importlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from bench.gpu.steps import copy_bandwidth
from hippo.catalog.sizes import ModelShape
from hippo.models.quantized.packed import make_packed

PRODUCT_COLUMNS = {
    "product": ("product", ""),
    "form": ("form", ""),
    "height": ("height", ",d"),
    "width": ("width", ",d"),
    "rows": ("rows", "d"),
    "µs": ("us", ".1f"),
    "floor µs": ("floor_us", ".1f"),
}
_NUM_CALLS, _NUM_REPLAYS = 5, 5

Product = Callable[[torch.Tensor], torch.Tensor]


def product_rows(
    shape: ModelShape, *, device: torch.device, rows: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Yields the microseconds of each product of a layer in bfloat16, nf4 and int8.

    In nf4 and int8 it is run by the quantiser's package and by hippo's kernels. A CUDA graph of
    five calls is replayed, so that the host's time does not count; the result is the median of five
    replays. The floor is the time to read the weight once at the bandwidth of a copy.
    """
    bandwidth = copy_bandwidth(str(device))
    width, heads = shape.hidden_size, shape.num_heads * shape.head_dim
    keys = shape.num_kv_heads * shape.head_dim
    products = {
        "query, key and value": ((heads, keys, keys), width),
        "output": ((width,), heads),
        "gate and up": ((shape.mlp_width, shape.mlp_width), width),
        "down": ((width,), shape.mlp_width),
    }
    for name, (heights, num_columns) in products.items():
        for form, (bits, product) in _forms(heights, num_columns, device):
            floor = 1e6 * sum(heights) * num_columns * bits / 8 / bandwidth
            for count in rows:
                x = torch.randn(count, num_columns, device=device, dtype=torch.bfloat16)
                yield {
                    "product": name,
                    "form": form,
                    "height": sum(heights),
                    "width": num_columns,
                    "rows": count,
                    "us": _microseconds(product, x),
                    "floor_us": floor,
                }
            del product
            torch.cuda.empty_cache()


def _forms(
    heights: Sequence[int], width: int, device: torch.device
) -> Iterator[tuple[str, tuple[float, Product]]]:
    plain = _layer(sum(heights), width, device)
    yield "bfloat16", (16.0, plain)
    del plain
    for name, package, bits, make in (
        ("nf4", "bitsandbytes", 4 + 16 / 64, _nf4_layer),
        ("int8", "torchao", 8.0, _int8_layer),
    ):
        layers = [make(height, width, device) for height in heights]
        yield f"{name}, {package}", (bits, _joined(layers))
        packed = make_packed(layers, torch.bfloat16)
        if packed is None:
            raise RuntimeError(f"no kernels for {name} here")
        yield f"{name}, hippo", (bits, packed)


def _joined(layers: Sequence[Product]) -> Product:
    return lambda x: torch.cat([layer(x) for layer in layers], -1)


def _layer(height: int, width: int, device: torch.device) -> torch.nn.Linear:
    layer = torch.nn.Linear(width, height, bias=False, device=device, dtype=torch.bfloat16)
    return layer.requires_grad_(False)


def _nf4_layer(height: int, width: int, device: torch.device) -> Any:
    bitsandbytes: Any = importlib.import_module("bitsandbytes")
    layer = bitsandbytes.nn.Linear4bit(
        width, height, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
    )
    return layer.to(device).requires_grad_(False)  # moving it quantises it


def _int8_layer(height: int, width: int, device: torch.device) -> Any:
    torchao: Any = importlib.import_module("torchao.quantization")
    layer = _layer(height, width, device)
    torchao.quantize_(layer, torchao.Int8WeightOnlyConfig(set_inductor_config=False))
    return layer


@torch.inference_mode()
def _microseconds(product: Product, x: torch.Tensor) -> float:
    product(x)
    make_stream: Any = torch.cuda.Stream  # untyped
    stream = make_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        product(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_NUM_CALLS):
            product(x)
    graph.replay()
    times: list[float] = []
    for _ in range(_NUM_REPLAYS):
        make_event: Any = torch.cuda.Event  # untyped
        began, ended = make_event(enable_timing=True), make_event(enable_timing=True)
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(1e3 * began.elapsed_time(ended) / _NUM_CALLS)
    return statistics.median(times)
