"""Step times, prefill times and memory of a model on GPUs, computed by the roofline model.

A decode step reads every weight and the whole KV cache once, which takes
``bytes / (bandwidth * share)``. If the arithmetic of the products or of the attention takes longer,
its time is used instead. To this are added the small operations of each layer and, across several
GPUs, two all-reduces per layer. If the host takes longer to launch the operations one by one, its
time is used instead. A step of several rows takes longer than one of a single row by a second
attention call a layer, and by more launches: a jump at the second row. Shares and overheads are
those that `python -m bench.gpu` found on an H200 with the shapes of Qwen2.5-VL-3B, 7B and 32B
(docs/gpu.json; tests compare them), except the all-reduces, which are assumed. Quantised layers are
read at the share that hippo's kernels reached on an H100 with the products of a 72B in nf4; each
forward of a prefill unpacks them.
"""

import itertools
import math
from dataclasses import dataclass

from hippo.catalog.sizes import (
    CHUNK_ROWS,
    DEVICE_BYTES,
    GIB,
    RESERVED_BYTES,
    Memory,
    ModelShape,
    chunk_rows_for,
    memory_of,
)
from hippo.errors import InvalidRequestError

_BYTES = 2  # bytes of a weight and of a cached number in bfloat16

# Time of a layer's four products in nf4 over the time with one row, up to a number of rows: 226 us
# for 1 to 8 rows, 255 for 16 and 346 for 32. The kernels take more rows 32 at a time.
_PACKED_TIMES = ((8, 1.0), (16, 255 / 226), (32, 346 / 226))

# Operations that the host launches for a layer, by tests/unit/models/runners/test_gpu_step.py.
_LAUNCHES_OF_ONE_ROW = 15
_LAUNCHES_OF_SEVERAL_ROWS = 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Data sheet values of a GPU; ``tflops`` is dense bfloat16 without sparsity."""

    name: str
    memory_gib: float
    bandwidth_gbs: float  # 1e9 bytes per second
    tflops: float

    @property
    def device_bytes(self) -> int:
        """The memory in bytes, to the last one where nvidia-smi's total is known."""
        return DEVICE_BYTES.get(round(self.memory_gib), round(self.memory_gib * GIB))


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(name="a100-40", memory_gib=40, bandwidth_gbs=1555, tflops=312),
        Gpu(name="a100", memory_gib=80, bandwidth_gbs=2039, tflops=312),
        Gpu(name="h100", memory_gib=80, bandwidth_gbs=3350, tflops=989),
        Gpu(name="h200", memory_gib=141, bandwidth_gbs=4800, tflops=989),
        Gpu(name="l40s", memory_gib=48, bandwidth_gbs=864, tflops=362),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The GPUs of one model, and the assumptions about them.

    ``bandwidth_share`` and ``compute_share`` are the shares of the data sheet's values that matrix
    products reach, ``attention_share`` is the share of the arithmetic in a decode step's attention,
    ``layer_us`` is the small operations of a layer on the device, ``block_us`` those besides in a
    step of several rows, ``sum_us`` one all-reduce (two per layer), ``packed_share`` the
    bandwidth's share of one row with quantised layers, ``launch_us`` the host's time to launch an
    operation, ``step_us`` sampling and the host's part of a step. With ``has_graphs`` (CUDA graphs)
    the launches of a step take no time.
    """

    gpu: Gpu
    num_gpus: int = 1
    bandwidth_share: float = 0.8
    compute_share: float = 0.5
    # The kernels of the 7B took 1.03 ms longer for 32 rows than for two after 25,600 tokens, whose
    # attention is 308e9 operations more: 300 of an H200's 989e12 a second.
    attention_share: float = 0.3
    layer_us: float = 65.0
    block_us: float = 25.0
    sum_us: float = 12.0
    # The products of a layer are 466 MB in nf4: 139 us at an H100's bandwidth, and 226 us measured.
    packed_share: float = 139 / 226
    launch_us: float = 20.0
    step_us: float = 150.0
    has_graphs: bool = True

    def step_ms(self, shape: ModelShape, num_rows: int, context: int) -> float:
        """Returns the milliseconds of a forward after ``context`` cached tokens."""
        products_ms = max(
            self._weights_ms(shape, num_rows),
            2e3 * num_rows * read_parameters(shape, 1) / self._flops,
        )
        attention = 4 * shape.num_attending * shape.num_heads * shape.head_dim * context * num_rows
        share = self.attention_share / self.compute_share
        attention_ms = max(
            1e3 * shape.cache_bytes(context) / self._bandwidth,
            1e3 * attention / (self._flops * share),
        )
        small_ms = self._small_ms(shape) + (num_rows > 1) * shape.num_layers * self.block_us / 1e3
        device_ms = products_ms + attention_ms + small_ms
        return max(device_ms, self._launch_ms(shape, num_rows)) + self.step_us / 1e3

    def prefill_ms(self, shape: ModelShape, end: int, start: int = 0) -> float:
        """Returns milliseconds of the prompt's rows from ``start`` to ``end``, without the vision
        tower: their arithmetic, and the unpacking of quantised layers for each forward."""
        linear = 2 * shape.num_read_parameters(1) * (end - start)
        attention = 2 * shape.num_attending * shape.num_heads * shape.head_dim * (end**2 - start**2)
        arithmetic_ms = 1e3 * (linear + attention) / self._flops
        if shape.layer_bits is not None:
            each = shape.num_shared_parameters * (shape.layer_bits / 8 + _BYTES) / self._bandwidth
            arithmetic_ms += 1e3 * each * math.ceil((end - start) / CHUNK_ROWS)
        return arithmetic_ms + self._small_ms(shape) + self.step_us / 1e3

    def helped_prefill_ms(
        self, shape: ModelShape, num_layers: int, num_tokens: int, tower_ms: float = 0.0
    ) -> tuple[float, float]:
        """Returns milliseconds from the end of the target's vision tower, which takes ``tower_ms``,
        until the draft may begin and until a prefill with a helper is over, chunk by chunk, without
        what the devices send each other. The helper begins with a chunk when its features are
        there. If it has less than half of the layers, the target scores the visual tokens."""
        first, others = map(shape.first_layers, (num_layers, shape.num_layers - num_layers))
        helper_ms, target_ms = -tower_ms, 0.0
        firsts = range(0, num_tokens, chunk_rows_for(num_tokens))
        for start, end in itertools.pairwise([*firsts, num_tokens]):
            featured_ms = tower_ms * (end / num_tokens - 1)
            helper_ms = max(helper_ms, featured_ms) + self.prefill_ms(first, end, start)
            target_ms = max(target_ms, helper_ms) + self.prefill_ms(others, end, start)
        return helper_ms if 2 * num_layers + 1 >= shape.num_layers else target_ms, target_ms

    def tower_ms(self, shape: ModelShape, num_visual_tokens: int) -> float:
        """Returns milliseconds of a video's products in the vision tower, on one GPU."""
        patches = num_visual_tokens * shape.tower.patches_per_token
        return 2e3 * shape.tower.num_parameters * patches * self.num_gpus / self._flops

    def memory_gib(self, shape: ModelShape, num_tokens: int) -> float:
        """Returns GiB of weights and KV cache of ``num_tokens`` on each GPU."""
        cache = shape.cache_bytes(num_tokens)
        return (shape.weight_bytes() + cache) / self.num_gpus / GIB

    def check_fits(self, shape: ModelShape, num_tokens: int) -> None:
        """Raises InvalidRequestError, with usable numbers of GPUs, if the GPUs cannot share the
        model or it does not fit."""
        if shape.num_kv_heads % self.num_gpus:
            fits = [n for n in range(1, shape.num_kv_heads + 1) if shape.num_kv_heads % n == 0]
            raise InvalidRequestError(
                f"{shape.name} has {shape.num_kv_heads} key-value heads, which {self.num_gpus} "
                f"GPUs cannot share; choose {', '.join(map(str, fits))}"
            )
        needed, room = self.memory_gib(shape, num_tokens), 0.95 * self.gpu.memory_gib
        if needed > room:
            total = needed * self.num_gpus
            raise InvalidRequestError(
                f"{shape.name} with {num_tokens:,} tokens needs {needed:.0f} GiB on each of "
                f"{self.num_gpus} {self.gpu.name}, which has {self.gpu.memory_gib:g}: "
                f"{total:.0f} GiB in all take {int(total // room) + 1} or more"
            )

    @property
    def _bandwidth(self) -> float:
        return 1e9 * self.gpu.bandwidth_gbs * self.bandwidth_share * self.num_gpus

    def _weights_ms(self, shape: ModelShape, num_rows: int) -> float:
        plain, layers = shape.num_head_parameters, shape.num_read_parameters(num_rows)
        if shape.layer_bits is None:
            return 1e3 * _BYTES * (plain + layers) / self._bandwidth
        packed = layers * shape.layer_bits / 8 * _packed_time(num_rows)
        packed *= self.bandwidth_share / self.packed_share
        return 1e3 * (_BYTES * plain + packed) / self._bandwidth

    @property
    def _flops(self) -> float:
        return 1e12 * self.gpu.tflops * self.compute_share * self.num_gpus

    def _small_ms(self, shape: ModelShape) -> float:
        sums_us = 2 * self.sum_us if self.num_gpus > 1 else 0.0
        return shape.num_layers * (self.layer_us + sums_us) / 1e3

    def _launch_ms(self, shape: ModelShape, num_rows: int) -> float:
        if self.has_graphs:
            return 0.0
        launches = _LAUNCHES_OF_ONE_ROW if num_rows == 1 else _LAUNCHES_OF_SEVERAL_ROWS
        launches += 2 if self.num_gpus > 1 else 0
        return shape.num_layers * launches * self.launch_us / 1e3


def read_parameters(shape: ModelShape, num_rows: int) -> float:
    """Returns the parameters that a decode step of ``num_rows`` reads: matrices of all layers and
    the head."""
    return shape.num_read_parameters(num_rows) + shape.num_head_parameters


def _packed_time(num_rows: int) -> float:
    """Returns the time of quantised products over the time for one row."""
    times = (time for most, time in _PACKED_TIMES if num_rows <= most)
    most, longest = _PACKED_TIMES[-1]
    return next(times, math.ceil(num_rows / most) * longest)


def helper_memory(
    target: ModelShape, draft: Memory, device_bytes: int, num_tokens: int
) -> dict[str, int]:
    """Returns how many of the target's first layers, at most half, a prefill helper can have beside
    the draft, and their bytes with one sequence of ``num_tokens``."""
    left = device_bytes - RESERVED_BYTES - draft.total
    most = 0 if target.states else target.num_layers // 2  # states are not sent
    for num_layers in range(most, 0, -1):
        part = target.first_layers(num_layers)
        memory = memory_of(part, num_tokens=num_tokens, num_slots=1, vision_cache_bytes=0)
        if memory.fits(left):
            return {"num_layers": num_layers, "total_bytes": memory.total}
    return {"num_layers": 0, "total_bytes": 0}


@dataclass(frozen=True, slots=True)
class RooflineTime:
    """The ForwardCost of a model on its GPUs."""

    place: Placement
    shape: ModelShape

    def ms(self, num_rows: int, context: int) -> float:
        return self.place.step_ms(self.shape, num_rows, context)
