"""Capturing a forward of fixed shape as a CUDA graph: one launch instead of hundreds.

torch.cuda's documentation ("CUDA Graphs") has the rules that are kept here: a few runs on a side
stream first, one memory pool for all graphs that are never played at the same time, and outputs
that are held as long as their graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Replay = Callable[[], torch.Tensor]
Capture = Callable[[Callable[[], torch.Tensor]], Replay]
"""Runs a function and gives what plays it again over the same tensors, and gives the same output
tensor, each time. Raises RuntimeError when something in it cannot be captured."""

_NUM_WARM_UPS = 2


class CudaGraphs:
    """Graphs of one device, which are played one at a time and share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None  # an opaque handle
        self._side: Any = None  # the stream of all captures: each has a cuBLAS workspace of its own

    def capture(self, run: Callable[[], torch.Tensor]) -> Replay:
        """See Capture; on the calling thread, which alone may use the device meanwhile."""
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
                # Other threads prepare prompts meanwhile: what they do is not forbidden to them.
                with torch.cuda.graph(
                    graph, pool=self._pool, stream=side, capture_error_mode="thread_local"
                ):
                    output = run()
            except BaseException:
                torch.cuda.set_stream(current)  # which torch does only when a capture ends well
                raise

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay
