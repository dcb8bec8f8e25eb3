"""The key-value cache: allocated ahead, written in place, rolled back by a length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

Views = Sequence[torch.Tensor]

_DEFINED_AT_ONCE = 256  # places; answers grow by few rows a step


def cache_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The cache's dtype for a model's: its own, but float32 on a CPU that does not multiply
    bfloat16 in tiles (AMX): attention is faster in it there, by half at 1,000 tokens."""
    if device.type == "cpu" and not (dtype == torch.bfloat16 and _has_tiles()):
        return torch.float32
    return dtype


def _has_tiles() -> bool:
    if not hasattr(torch.cpu, "get_capabilities"):  # an older torch
        return False
    return bool(torch.cpu.get_capabilities().get("amx_bf16", False))


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a cache must hold."""

    num_layers: int
    num_slots: int
    num_kv_heads: int
    capacity: int  # tokens a slot
    head_dim: int
    num_spare: int = 0  # places after a slot's capacity, where padding of fixed shapes may go

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Memory of keys and values together."""
        per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize
        return per_token * self.num_slots * self.num_places

    @property
    def num_places(self) -> int:
        """Tokens that a slot has memory for."""
        return self.capacity + self.num_spare


class KeyValueCache:
    """Keys and values of every layer and slot in one tensor.

    Keys and values of a layer lie side by side, so that one strided copy writes a step's rows of
    both, and a head's tokens are contiguous, as attention reads them:

        data    # [num_layers, num_slots, 2, num_kv_heads, num_places, head_dim]

    The caller knows a slot's valid length, and writing at an earlier index is the
    rollback. Only what is read beyond that length, and masked, must hold numbers: see ``define``.
    """

    def __init__(self, shape: CacheShape, *, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self._data = torch.zeros(
            shape.num_layers,
            shape.num_slots,
            2,
            shape.num_kv_heads,
            shape.num_places,
            shape.head_dim,
            dtype=dtype,
            device=device,
        )
        self._defined: dict[int, int] = {}  # by slot: no place before this one is undefined

    def written(self, slot: int, start: int, end: int) -> Views:
        """Where a step writes tokens ``start:end``: ``[2, num_kv_heads, tokens, head_dim]`` a
        layer, keys first; views of the cache."""
        assert 0 <= start < end <= self.shape.capacity, (start, end)
        views: Views = self._data[:, slot, :, :, start:end].unbind(0)
        return views

    def seen(self, slot: int, end: int) -> tuple[Views, Views]:
        """Keys and values of tokens ``0:end``, each ``[num_kv_heads, 1, tokens, head_dim]`` a
        layer; views of the cache."""
        stretch = self._data[:, slot, :, :, None, :end]
        return stretch[:, 0].unbind(0), stretch[:, 1].unbind(0)

    def slot(self, slot: int) -> Views:
        """All of a slot: ``[2, num_kv_heads, num_places, head_dim]`` a layer; views."""
        views: Views = self._data[:, slot].unbind(0)
        return views

    def copy(self, source: int, slot: int, end: int) -> None:
        """Tokens ``0:end`` of one slot become those of another."""
        assert 0 < end <= self.shape.capacity and source != slot, (source, slot, end)
        self._data[:, slot, :, :, :end].copy_(self._data[:, source, :, :, :end])

    def forget(self, slot: int) -> None:
        """The slot is being filled anew."""
        self._defined.pop(slot, None)

    def define(self, slot: int, start: int, end: int) -> None:
        """Sees to it that places up to ``end`` hold numbers, for they are masked but read: what a
        failed sequence left there may be no number, and zero times that is none either.

        ``start`` is where the next step writes: what stands from there on is worth nothing. What
        steps of the same sequence left behind it counts as numbers.
        """
        defined = max(self._defined.get(slot, start), start)
        end = min(-(-end // _DEFINED_AT_ONCE) * _DEFINED_AT_ONCE, self.shape.num_places)
        if end > defined:
            self._data[:, slot, :, :, defined:end].zero_()
            self._defined[slot] = end

    def seen_together(self, first_slot: int, num_slots: int, end: int) -> tuple[Views, Views]:
        """Keys and values of tokens ``0:end`` of neighbouring slots, each ``[num_slots,
        num_kv_heads, tokens, head_dim]`` a layer; views of the cache."""
        stretch = self._data[:, first_slot : first_slot + num_slots, :, :, :end]
        return stretch[:, :, 0].unbind(0), stretch[:, :, 1].unbind(0)

    def written_together(self, first_slot: int, num_slots: int) -> Views:
        """Where steps write in neighbouring slots: ``[num_slots, num_places, 2, num_kv_heads,
        head_dim]`` a layer, keys first; views of the cache."""
        slots = self._data[:, first_slot : first_slot + num_slots]
        views: Views = slots.permute(0, 1, 4, 2, 3, 5).unbind(0)
        return views
