"""Caches bounded in bytes, which drop the least recently used values first."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


class BoundedCache(Generic[KeyT, ValueT]):
    """Holds values of at most ``max_bytes`` bytes in total (0: stores nothing). Only one thread
    may use the cache; any thread may read the counts."""

    def __init__(self, max_bytes: int, *, size: Callable[[ValueT], int]) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_hits = 0
        self.num_misses = 0
        self._size = size
        self._values: dict[KeyT, ValueT] = {}  # the least recently used first

    def get(self, key: KeyT) -> ValueT | None:
        """Returns the value, which must not be changed, or None if there is no value."""
        value = self._values.pop(key, None)
        if value is None:
            self.num_misses += 1
            return None
        self._values[key] = value
        self.num_hits += 1
        return value

    def put(self, key: KeyT, value: ValueT) -> None:
        """Stores a value, unless the value alone exceeds ``max_bytes``."""
        num_bytes = self._size(value)
        if num_bytes > self.max_bytes:
            return
        self._drop(key)
        while self.num_bytes + num_bytes > self.max_bytes:
            self._drop(next(iter(self._values)))
        self._values[key] = value
        self.num_bytes += num_bytes

    def _drop(self, key: KeyT) -> None:
        if (value := self._values.pop(key, None)) is not None:
            self.num_bytes -= self._size(value)


class VisionCache(BoundedCache[bytes, torch.Tensor]):
    """Caches the vision tower's output by content, so that a second question about a clip does
    not run the vision tower again. Only the device thread uses the cache.

    SHA-256 of pixels and grid  ──►  features [num_tokens, width], on the model's device
    """

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes, size=lambda features: features.nbytes)

    def put(self, key: bytes, value: torch.Tensor) -> None:
        """Stores an item's features. A view is copied, because it would hold its whole storage."""
        is_view = value.untyped_storage().nbytes() != value.nbytes
        super().put(key, value.clone() if is_view and value.nbytes <= self.max_bytes else value)
