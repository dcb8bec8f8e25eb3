"""Captures a forward of fixed shape as a CUDA graph: one launch instead of hundreds.

The capture follows the rules of torch.cuda's documentation ("CUDA Graphs"): a few runs on a side
stream first, one memory pool for graphs that are never replayed at the same time, and outputs that
live as long as their graph.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

Replay = Callable[[], torch.Tensor]
Capture = Callable[[Callable[[], torch.Tensor]], Replay]
"""Runs a function and returns its replay, which reads the same input tensors and returns the same
output tensor each time. Raises RuntimeError if an operation cannot be captured."""

_NUM_WARM_UPS = 2


class CudaGraphs:
    """Graphs of one device, which are replayed one at a time and share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None  # an opaque handle
        # One stream for all captures, because each stream has its own cuBLAS workspace.
        self._side: Any = None

    def capture_graph(self, run: Callable[[], torch.Tensor]) -> Replay:
        """See Capture; no other thread may use the device during the call."""
        with torch.cuda.device(self._device), torch.inference_mode():
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
                self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            current, side = torch.cuda.current_stream(), self._side
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for _ in range(_NUM_WARM_UPS):
                    run()
            current.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            try:
                # thread_local: other threads prepare prompts during the capture.
                with torch.cuda.graph(
                    graph, pool=self._pool, stream=side, capture_error_mode="thread_local"
                ):
                    output = run()
            except BaseException:
                # torch does both only after a successful capture.
                torch.cuda.set_stream(current)
                with suppress(RuntimeError):  # the allocator's part may be over
                    torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
                raise

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay
