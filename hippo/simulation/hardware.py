"""Step times, prefill times and memory of a model on GPUs, from bytes over bandwidth.

A decode step reads every weight and the whole cache once; with few rows it is as fast as the
memory. So ``bytes / (bandwidth x share)`` is its time, plus what a layer costs in launches and,
across several GPUs, in two sums. Where the arithmetic of the rows takes longer, that counts
instead. Nothing here is measured: shares and overheads are assumptions, named and changeable.
"""

from __future__ import annotations

from dataclasses import dataclass

from hippo.errors import InvalidRequestError
from hippo.simulation.machine import ForwardTime
from hippo.sizes import GIB, ModelShape

_BYTES = 2  # of a weight and of a cached number: bfloat16
_ROWS = 16  # the rows at which the line of ForwardTime meets the roofline


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU by its data sheet: dense bfloat16 arithmetic, no sparsity."""

    name: str
    memory_gib: float
    bandwidth_gbs: float  # 1e9 bytes a second
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
    """GPUs of one model and what is assumed of them.

    ``bandwidth_share`` and ``compute_share`` are what a good kernel reaches of the data sheet,
    ``layer_us`` launches and norms of a layer as captured graphs leave them, ``sum_us`` one sum
    over the GPUs (two a layer), ``step_us`` sampling and the host's part of a step.
    """

    gpu: Gpu
    num_gpus: int = 1
    bandwidth_share: float = 0.75
    compute_share: float = 0.5
    layer_us: float = 8.0
    sum_us: float = 12.0
    step_us: float = 150.0

    def step_ms(self, shape: ModelShape, num_rows: int, context: int) -> float:
        """One forward of ``num_rows`` rows behind ``context`` cached tokens, by the roofline."""
        read = _BYTES * read_parameters(shape) + shape.cache_bytes(1) * context
        memory_ms = 1e3 * read / self._bandwidth
        compute_ms = 1e3 * self._flops_of(shape, num_rows, context) / self._flops
        return max(memory_ms, compute_ms) + self._overhead_ms(shape)

    def step_time(self, shape: ModelShape, context: int) -> ForwardTime:
        """``step_ms`` as a line, right for 1 and 16 rows at ``context``."""
        base = self.step_ms(shape, 1, 0)
        slope = (self.step_ms(shape, _ROWS, context) - self.step_ms(shape, 1, context)) / (
            _ROWS - 1
        )
        per_kilotoken = 1e6 * shape.cache_bytes(1) / self._bandwidth
        return ForwardTime(one_row_ms=base, row_ms=slope, kilotoken_ms=per_kilotoken)

    def prefill_ms(self, shape: ModelShape, num_tokens: int) -> float:
        """Prefill of so many tokens: arithmetic alone, the vision tower left out."""
        linear = 2 * shape.num_shared_parameters * num_tokens
        attention = 2 * shape.num_layers * shape.num_heads * shape.head_dim * num_tokens**2
        return 1e3 * (linear + attention) / self._flops + self._overhead_ms(shape)

    def memory_gib(self, shape: ModelShape, num_tokens: int) -> float:
        """Weights and the cache of ``num_tokens``, on each GPU."""
        cache = shape.cache_bytes(num_tokens)
        return (_BYTES * shape.num_parameters + cache) / self.num_gpus / GIB

    def check(self, shape: ModelShape, num_tokens: int) -> None:
        """Raises InvalidRequestError when that does not fit, with the number of GPUs it takes."""
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

    @property
    def _flops(self) -> float:
        return 1e12 * self.gpu.tflops * self.compute_share * self.num_gpus

    def _flops_of(self, shape: ModelShape, num_rows: int, context: int) -> float:
        attention = 4 * shape.num_layers * shape.num_heads * shape.head_dim * context
        return num_rows * (2 * read_parameters(shape) + attention)

    def _overhead_ms(self, shape: ModelShape) -> float:
        sums_us = 2 * self.sum_us if self.num_gpus > 1 else 0.0
        return (self.step_us + shape.num_layers * (self.layer_us + sums_us)) / 1e3


def read_parameters(shape: ModelShape) -> int:
    """What a decode step reads: the products of all layers, and the head."""
    return shape.num_shared_parameters + shape.num_head_parameters
