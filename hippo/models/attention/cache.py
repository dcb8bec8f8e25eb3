"""The KV cache: allocated at the start, written in place, rolled back by a start index."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from hippo.catalog.states import StateShape
from hippo.models.attention.states import LayerStates, zero_state
from hippo.models.attention.zeros import zeros
from hippo.models.products.linear import packing

Views = Sequence[torch.Tensor]

MASK_ALIGNMENT = 16  # columns; kernels on a GPU copy a mask whose rows are not aligned

_ZEROED_AT_ONCE = 256  # places; a completion grows by few rows a step


def cache_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Returns the cache's dtype for a model of ``dtype``: ``dtype``, but float32 on a CPU without
    AMX tiles for bfloat16, where attention over 1,000 tokens is then faster by half."""
    if device.type == "cpu" and not (dtype == torch.bfloat16 and _has_bfloat16_tiles()):
        return torch.float32
    return dtype


def _has_bfloat16_tiles() -> bool:
    """Whether the processor has the tiles and oneDNN, which attention multiplies by, uses them."""
    has_tiles = bool(torch.cpu.get_capabilities().get("amx_bf16", False))
    return has_tiles and packing(torch.bfloat16) is not None


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The dimensions of a cache."""

    num_layers: int  # that attend
    num_slots: int
    num_kv_heads: int
    capacity: int  # tokens per slot
    head_dim: int
    num_spare: int = 0  # places behind a slot's capacity for the padding of fixed shapes
    states: StateShape | None = None  # of the other layers

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Returns the memory of keys and values together, and of states."""
        per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize
        states = 0 if self.states is None else self.states.num_bytes(dtype.itemsize)
        return self.num_slots * (per_token * self.num_places + states)

    @property
    def num_places(self) -> int:
        """Number of tokens for which a slot has memory."""
        return self.capacity + self.num_spare


class KeyValueCache:
    """Keys and values of every layer and slot in one tensor.

    Keys and values of a layer are adjacent, so that one strided copy writes a step's rows of both.
    The tokens of a head are contiguous, as attention reads them:

        data    # [num_layers, num_slots, 2, num_kv_heads, num_places, head_dim]

    ``states`` belong to the layers that have one in place of keys and values.

    The caller keeps a slot's valid length; to write at an earlier index is a rollback. Places that
    are read behind the valid length are masked but must not hold NaN: see ``zero_unwritten``.
    """

    def __init__(self, shape: CacheShape, *, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        sizes = (shape.num_layers, shape.num_slots, 2, shape.num_kv_heads)
        self._data = zeros((*sizes, shape.num_places, shape.head_dim), dtype, device)
        self._defined: dict[int, int] = {}  # by slot: places below this index hold finite numbers
        self.rows: Views = [self._rows_of(layer) for layer in range(shape.num_layers)]
        """Views by layer ``[rows, 2, num_kv_heads, head_dim]``, by ``row_of``, keys first."""
        self.keys_and_values = [rows.unbind(1) for rows in self.rows]
        own, count = shape.states, shape.num_slots
        self.states: list[LayerStates] = []
        if own is not None:
            zero = zero_state(own, dtype, device)
            states = partial(
                LayerStates, own, num_slots=count, dtype=dtype, device=device, zero=zero
            )
            self.states = [states() for _ in range(own.num_layers)]

    def row_of(self, slot: int, place: int) -> int:
        """Returns the index in ``rows`` of a token, of which the next one is the next token."""
        return 2 * self.shape.num_kv_heads * self.shape.num_places * slot + place

    def _rows_of(self, layer: int) -> torch.Tensor:
        """Returns a layer's rows, which overlap: the next head begins ``num_places`` rows later.

        row  ``r`` of head 0      row  ``r + num_places`` of head 0  =  row ``r`` of head 1
        """
        shape = self.shape
        head = shape.num_places * shape.head_dim
        num_rows = self.row_of(shape.num_slots - 1, shape.num_places)
        assert num_rows < 1 << 31, "attention on a GPU takes int32 row numbers"
        return self._data[layer].as_strided(
            (num_rows, 2, shape.num_kv_heads, shape.head_dim),
            (shape.head_dim, shape.num_kv_heads * head, head, 1),
        )

    def written(self, slot: int, start: int, end: int) -> Views:
        """Returns where a step writes tokens ``start:end``: a view of the cache for each layer,
        ``[2, num_kv_heads, tokens, head_dim]``, keys first."""
        assert 0 <= start < end <= self.shape.num_places, (start, end)
        views: Views = self._data[:, slot, :, :, start:end].unbind(0)
        return views

    def seen(self, slot: int, end: int) -> tuple[Views, Views]:
        """Returns keys and values of tokens ``0:end``: a view of the cache for each layer,
        ``[num_kv_heads, 1, tokens, head_dim]``."""
        stretch = self._data[:, slot, :, :, None, :end]
        return stretch[:, 0].unbind(0), stretch[:, 1].unbind(0)

    def first_layers(self, num_layers: int, slot: int, start: int, end: int) -> torch.Tensor:
        """Returns a view of tokens ``start:end`` in the first layers, ``[num_layers, 2,
        num_kv_heads, tokens, head_dim]``, keys first."""
        return self._data[:num_layers, slot, :, :, start:end]

    def slot(self, slot: int) -> Views:
        """Returns a view of the whole slot by layer: ``[2, num_kv_heads, places, head_dim]``."""
        views: Views = self._data[:, slot].unbind(0)
        return views

    def reusable_rows(self, slot: int, num_rows: int) -> int:
        """Returns how many of the first ``num_rows`` rows a prefill can go on behind: all, or in a
        cache with states those up to the last place where each layer has one."""
        reaches = [layer.reaches for layer in self.states]
        places = range(num_rows, 0, -1)
        return next((p for p in places if all(reach(slot, p) for reach in reaches)), 0)

    def copy_rows(self, source: int, slot: int, end: int) -> None:
        """Copies tokens ``0:end`` of slot ``source`` to ``slot``."""
        assert 0 < end <= self.shape.capacity and source != slot, (source, slot, end)
        self._data[:, slot, :, :, :end].copy_(self._data[:, source, :, :, :end])

    def forget_slot(self, slot: int) -> None:
        """Marks all places of the slot as unwritten, before another prompt fills the slot."""
        self._defined.pop(slot, None)

    def zero_unwritten(self, slot: int, start: int, end: int) -> None:
        """Zeroes the unwritten places below ``end``, which the next step reads under a mask.

        A failed sequence may have left NaN there, and a masked NaN still makes the output NaN.
        ``start`` is where the next step writes. Places from ``start`` on that earlier steps of the
        same sequence wrote hold finite numbers and are not zeroed.
        """
        defined = max(self._defined.get(slot, start), start)
        end = min(-(-end // _ZEROED_AT_ONCE) * _ZEROED_AT_ONCE, self.shape.num_places)
        if end > defined:
            self._data[:, slot, :, :, defined:end].zero_()
            self._defined[slot] = end

    def seen_together(self, first_slot: int, num_slots: int, end: int) -> tuple[Views, Views]:
        """Returns keys and values of tokens ``0:end`` of neighbouring slots: a view of the cache
        for each layer, ``[num_slots, num_kv_heads, tokens, head_dim]``."""
        stretch = self._data[:, first_slot : first_slot + num_slots, :, :, :end]
        return stretch[:, :, 0].unbind(0), stretch[:, :, 1].unbind(0)

    def written_together(self, first_slot: int, num_slots: int) -> Views:
        """Returns where steps write in neighbouring slots: a view of the cache for each layer,
        ``[num_slots, num_places, 2, num_kv_heads, head_dim]``, keys first."""
        slots = self._data[:, first_slot : first_slot + num_slots]
        views: Views = slots.permute(0, 1, 4, 2, 3, 5).unbind(0)
        return views
