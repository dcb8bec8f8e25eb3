"""A stand-in for CUDA graphs on any device: records operations, plays them on the same tensors.

As with a captured graph, a replay sees nothing of the host: neither Python's numbers nor tensors
that were made after the capture.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hippo.models.cached import CachedModel
from hippo.models.runners.captured import CapturedRunner
from hippo.models.runners.graphs import Replay

Operation = tuple[Any, tuple[Any, ...], dict[str, Any], Any]


class RecordedGraphs:
    """Captures by recording; ``num_replays`` counts what was played."""

    def __init__(self) -> None:
        self.num_captured = 0
        self.num_replays = 0

    def capture_graph(self, run: Callable[[], torch.Tensor]) -> Replay:
        self.num_captured += 1
        recorder = _Recorder()
        with torch.inference_mode(), recorder:
            output = run()

        def replay() -> torch.Tensor:
            self.num_replays += 1
            with torch.inference_mode():
                for function, args, kwargs, recorded in recorder.operations:
                    _write(recorded, function(*args, **kwargs))
            return output

        return replay


def runner_of(model: CachedModel, capture: Any, **options: Any) -> CapturedRunner:
    return CapturedRunner(model._stack, model._cache, model.embedding, capture, **options)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        assert func is not torch.ops.aten._local_scalar_dense.default, "a read of the host"
        self.operations.append((func, args, kwargs or {}, result))
        return result


def _write(recorded: Any, computed: Any) -> None:
    """What a replayed operation gives goes where the recorded one's result stood."""
    for old, new in zip(tree_leaves(recorded), tree_leaves(computed), strict=True):
        if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
            old.copy_(new)
