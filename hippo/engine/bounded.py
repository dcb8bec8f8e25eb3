"""A cache that is bounded in bytes: the least recently used give way."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

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
