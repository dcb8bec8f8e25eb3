"""What tensors operations write, and how much memory tensors hold at once: counted, not timed."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorTrace(TorchDispatchMode):
    """Counts within a ``with`` block, on any device, ``meta`` included.

    ``written`` has the bytes that each operator wrote: its new tensors, and those that it changes
    in place. A view writes nothing. ``peak_bytes`` is the most that tensors made inside the block
    held at once. Memory that a kernel takes for itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: Counter[str] = Counter()
        self.peak_bytes = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        known = {_key(tensor) for tensor in _tensors((args, given))}
        result = func(*args, **given)
        num_written = 0
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[place] if place < len(args) else given.get(argument.name)
                num_written += sum(tensor.nbytes for tensor in _tensors(value))
        for tensor in _tensors(result):
            key = _key(tensor)
            if key is not None and key not in known:
                known.add(key)
                num_written += tensor.nbytes
                self._add(key, tensor.untyped_storage())
        if num_written:
            self.written[str(func)] += num_written
        return result

    def _add(self, key: int, storage: torch.UntypedStorage) -> None:
        self._live = {
            other: (reference, size)
            for other, (reference, size) in self._live.items()
            if not reference.expired()  # type: ignore[no-untyped-call]
        }
        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._live[key] = (reference, storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._live.values()))


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _key(tensor: torch.Tensor) -> int | None:
    """Which storage it is of; None for one without (a weight that oneDNN has packed)."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return None
