"""Caches that are bounded in bytes: the least recently used give way."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


class BoundedCache(Generic[KeyT, ValueT]):
    """Values of at most ``max_bytes`` in all (0: none are kept). One thread alone; the counts may
    be read from anywhere."""

    def __init__(self, max_bytes: int, *, size: Callable[[ValueT], int]) -> None:
        """``size`` tells a value's bytes."""
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_hits = 0
        self.num_misses = 0
        self._size = size
        self._values: dict[KeyT, ValueT] = {}  # the least recently used first

    def get(self, key: KeyT) -> ValueT | None:
        """The value, not to be changed; None if it is not there."""
        value = self._values.pop(key, None)
        if value is None:
            self.num_misses += 1
            return None
        self._values[key] = value
        self.num_hits += 1
        return value

    def put(self, key: KeyT, value: ValueT) -> None:
        """Keeps it, unless it alone exceeds the bound."""
        num_bytes = self._size(value)
        if num_bytes > self.max_bytes:
            return
        self._drop(key)
        while self.num_bytes + num_bytes > self.max_bytes:
            self._drop(next(iter(self._values)))
        self._values[key] = value
        self.num_bytes += num_bytes

    def _drop(self, key: KeyT) -> None:
        value = self._values.pop(key, None)
        if value is not None:
            self.num_bytes -= self._size(value)


class VisionCache(BoundedCache[bytes, torch.Tensor]):
    """The vision tower's output by content: a second question about a clip does not look at it
    again. The device thread's.

    digest of pixels and grid  ──►  features [num_tokens, hidden], on the model's device

    Equal digests mean equal pixels (SHA-256), so an entry is used only for the same pixels.
    """

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes, size=lambda features: features.nbytes)

    def put(self, key: bytes, value: torch.Tensor) -> None:
        """Keeps an item's features; a view is copied, so that what is counted is what is held."""
        is_view = value.untyped_storage().nbytes() != value.nbytes
        super().put(key, value.clone() if is_view and value.nbytes <= self.max_bytes else value)
