"""Step times, prefill times and memory of a model on GPUs, computed by the roofline model.

A decode step reads every weight and the whole KV cache once, which takes
``bytes / (bandwidth * share)``. If the arithmetic of the rows takes longer, its time is used
instead. To this are added the small operations of each layer and, across several GPUs, two
all-reduces per layer. If the host takes longer to launch the operations one by one, its time is
used instead. Shares and overheads are those that `python -m bench.gpu` found on an H200 with the
shapes of Qwen2.5-VL-3B, 7B and 32B (docs/gpu.md), except the all-reduces, which are assumed.
Quantised layers are read at the share that hippo's kernels reached on an H100 with the products of
a 72B in nf4 (docs/gpu.md); that a prefill unpacks them is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from hippo.errors import InvalidRequestError
from hippo.simulation.machine import ForwardTime
from hippo.sizes import GIB, ModelShape

_BYTES = 2  # of a weight and of a cached number, in bfloat16
_ROWS = 16  # rows at which ForwardTime's line meets the roofline

# Operations that the host launches for a layer, by tests/unit/models/test_gpu_step.py.
_LAUNCHES_OF_ONE_ROW = 15
_LAUNCHES_OF_SEVERAL_ROWS = 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Data sheet values of a GPU; ``tflops`` is dense bfloat16 without sparsity."""

    name: str
    memory_gib: float
    bandwidth_gbs: float  # 1e9 bytes per second
    tflops: float


GPUS = {
    gpu.name: gpu
    for gpu in (
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
    products reach, ``layer_us`` is the small operations of a layer on the device, ``block_us``
    those besides in a step of several rows, ``sum_us`` one all-reduce (two per layer),
    ``packed_share`` is the bandwidth's share with quantised layers, whose products take
    ``packed_row_share`` longer for each row after the first,
    ``launch_us`` the host's time to launch an operation, ``step_us`` sampling and the host's part
    of a step. With ``has_graphs`` a step on one GPU is one launch (CUDA graphs).
    """

    gpu: Gpu
    num_gpus: int = 1
    bandwidth_share: float = 0.8
    compute_share: float = 0.5
    layer_us: float = 65.0
    block_us: float = 25.0
    sum_us: float = 12.0
    # Gate, up and down of a layer are 386 MB in nf4: 115 us at an H100's bandwidth. Measured were
    # 174 us for one row and 197 us for 16.
    packed_share: float = 0.66
    packed_row_share: float = (197 / 174 - 1) / 15
    launch_us: float = 20.0
    step_us: float = 150.0
    has_graphs: bool = True

    def step_ms(self, shape: ModelShape, num_rows: int, context: int) -> float:
        """Returns the milliseconds of a forward after ``context`` cached tokens."""
        memory_ms = self._weights_ms(shape, num_rows) + self._cache_ms(shape) * context
        compute_ms = 1e3 * self._flops_of(shape, num_rows, context) / self._flops
        small_ms = self._small_ms(shape) + (num_rows > 1) * shape.num_layers * self.block_us / 1e3
        device_ms = max(memory_ms, compute_ms) + small_ms
        return max(device_ms, self._launch_ms(shape, num_rows)) + self.step_us / 1e3

    def step_time(self, shape: ModelShape, context: int) -> ForwardTime:
        """Returns a linear ``step_ms``, exact for 1 and 16 rows at ``context``."""
        one_row = self.step_ms(shape, 1, context)
        slope = (self.step_ms(shape, _ROWS, context) - one_row) / (_ROWS - 1)
        kilotoken = 1e3 * self._cache_ms(shape)
        base = one_row - kilotoken * context / 1e3
        return ForwardTime(one_row_ms=base, row_ms=slope, kilotoken_ms=kilotoken)

    def prefill_ms(self, shape: ModelShape, num_tokens: int) -> float:
        """Returns milliseconds of a prefill: its arithmetic, without the vision tower."""
        linear = 2 * shape.num_read_parameters(1) * num_tokens
        attention = 2 * shape.num_layers * shape.num_heads * shape.head_dim * num_tokens**2
        arithmetic_ms = 1e3 * (linear + attention) / self._flops
        return arithmetic_ms + self._small_ms(shape) + self.step_us / 1e3

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
        packed = layers * shape.layer_bits / 8 * (1 + self.packed_row_share * (num_rows - 1))
        packed *= self.bandwidth_share / self.packed_share
        return 1e3 * (_BYTES * plain + packed) / self._bandwidth

    def _cache_ms(self, shape: ModelShape) -> float:
        """Returns the time to read a token's keys and values."""
        return 1e3 * shape.cache_bytes(1) / self._bandwidth

    @property
    def _flops(self) -> float:
        return 1e12 * self.gpu.tflops * self.compute_share * self.num_gpus

    def _flops_of(self, shape: ModelShape, num_rows: int, context: int) -> float:
        attention = 4 * shape.num_layers * shape.num_heads * shape.head_dim * context
        return num_rows * (2 * read_parameters(shape, 1) + attention)

    def _small_ms(self, shape: ModelShape) -> float:
        sums_us = 2 * self.sum_us if self.num_gpus > 1 else 0.0
        return shape.num_layers * (self.layer_us + sums_us) / 1e3

    def _launch_ms(self, shape: ModelShape, num_rows: int) -> float:
        if self.has_graphs and self.num_gpus == 1:
            return 0.0
        launches = _LAUNCHES_OF_ONE_ROW if num_rows == 1 else _LAUNCHES_OF_SEVERAL_ROWS
        launches += 2 if self.num_gpus > 1 else 0
        return shape.num_layers * launches * self.launch_us / 1e3


def read_parameters(shape: ModelShape, num_rows: int) -> float:
    """Returns the parameters that a decode step of ``num_rows`` reads: matrices of all layers and
    the head."""
    return shape.num_read_parameters(num_rows) + shape.num_head_parameters
