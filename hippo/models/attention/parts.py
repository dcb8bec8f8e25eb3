"""Attention over the in-place cache.

The rows of several sequences are flattened. The n rows of a sequence are the last of its cached
tokens, so row k attends to all but the last ``n - 1 - k`` tokens (a causal mask aligned at the
bottom right).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from hippo.models.attention.cache import MASK_ALIGNMENT, KeyValueCache
from hippo.models.attention.flash import attend_flash
from hippo.models.attention.states import LayerStates, StateRows
from hippo.models.interface.plan import MAX_GROUPED_ROWS


class Part(Protocol):
    """Flattened rows of a forward whose attention is computed together."""

    @property
    def first_row(self) -> int:
        """The index of the first row in the forward."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""

    def attend(
        self, query: torch.Tensor, key_value: torch.Tensor, layer: int, scaling: float
    ) -> torch.Tensor:
        """Writes these rows' keys and values to the cache and attends.

        ``query`` is ``[num_rows, num_kv_heads, groups, head_dim]``, ``key_value`` is
        ``[num_rows, 2, num_kv_heads, head_dim]``; the result ``[num_rows, num_heads * head_dim]``.
        """


@dataclass(frozen=True, slots=True)
class SequencePart:
    """One sequence's rows of a forward, and the part of the cache that they attend to.

    ``written``, ``keys`` and ``values`` hold one view of the cache per layer; the rows are the last
    tokens of the keys. ``mask`` is additive; it is None for a single row, which attends to all
    tokens, and with ``is_causal``, if the cache held no tokens before. With ``is_flash`` the kernel
    applies the causal mask itself (hippo.models.attention.flash).
    """

    first_row: int
    num_rows: int
    written: Sequence[torch.Tensor]  # [2, num_kv_heads, num_rows, head_dim]
    keys: Sequence[torch.Tensor]  # [num_kv_heads, 1, tokens, head_dim]
    values: Sequence[torch.Tensor]  # [num_kv_heads, 1, tokens, head_dim]
    mask: torch.Tensor | None  # [num_rows, tokens], or [num_rows * groups, tokens] if is_grouped
    is_causal: bool
    is_grouped: bool  # few rows: the query heads of a group become rows of one product
    is_flash: bool = False

    def attend(
        self, query: torch.Tensor, key_value: torch.Tensor, layer: int, scaling: float
    ) -> torch.Tensor:
        """See Part.attend."""
        self.write_cache(key_value, layer)
        return self.read_cache(query, layer, scaling)

    def write_cache(self, key_value: torch.Tensor, layer: int) -> None:
        """Writes the rows' keys and values to the cache."""
        self.written[layer].copy_(key_value.permute(1, 2, 0, 3))

    def read_cache(self, query: torch.Tensor, layer: int, scaling: float) -> torch.Tensor:
        """Computes the rows' attention over the cached keys and values."""
        key, value = self.keys[layer], self.values[layer]
        rows, num_kv_heads, groups, head_dim = query.shape
        if self.is_flash:
            return attend_flash(query, key, value, scaling)
        if self.is_grouped:
            # Keys are read once for all query heads that share them; no keys are repeated.
            output = scaled_dot_product_attention(
                query.transpose(0, 1).reshape(num_kv_heads, 1, rows * groups, head_dim),
                key,
                value,
                attn_mask=self.mask,
                scale=scaling,
            )
            if rows == 1:
                return output.view(1, -1)
            return output.view(num_kv_heads, rows, -1).transpose(0, 1).reshape(rows, -1)
        # Many rows: with separate heads the kernel can skip what is causally masked.
        output = scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.expand(-1, groups, -1, -1),
            value.expand(-1, groups, -1, -1),
            attn_mask=self.mask,
            is_causal=self.is_causal,
            scale=scaling,
        )  # [num_kv_heads, groups, rows, head_dim]
        return output.permute(2, 0, 1, 3).reshape(rows, -1)


@dataclass(frozen=True, slots=True)
class QueryTap:
    """Keeps the queries of some rows of a forward, as attention uses them, for scoring."""

    rows: torch.Tensor  # int64 [num_tapped]
    # By layer, one tensor [num_tapped, num_heads, head_dim] per forward.
    queries: dict[int, list[torch.Tensor]]

    def keep_queries(self, layer: int, query: torch.Tensor) -> None:
        """Adds the tapped rows of ``query`` (``[rows, num_kv_heads, groups, head_dim]``)."""
        self.queries.setdefault(layer, []).append(query[self.rows].flatten(1, 2))


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """One forward over the flattened rows of its sequences, in order. The last rows may be padding,
    which does not attend and is not cached.

    With ``wants_last_row`` there is one sequence; all its rows are cached, but the layer's output
    is the last row's only, as the last layer of a prefill needs it. ``states`` and ``state_rows``
    are for the layers that have a state in place of keys and values.
    """

    sequences: tuple[Part, ...]
    dtype: torch.dtype  # the cache's, in which attention runs
    tap: QueryTap | None = None
    num_padding: int = 0
    wants_last_row: bool = False
    states: Sequence[LayerStates] = ()
    state_rows: tuple[StateRows, ...] = ()


class ChunkMask:
    """One causal mask for all chunks of a prompt: a chunk's mask is a range of its columns.

    0 0 0 0 0 . . .     row i of the last chunk, which begins at s: columns up to s + i
    0 0 0 0 0 0 . .     a chunk that begins at s - k uses the columns from k on
    """

    def __init__(self, cache: KeyValueCache, *, num_rows: int, last_start: int) -> None:
        width = -(-(last_start + num_rows) // MASK_ALIGNMENT) * MASK_ALIGNMENT
        self._data = torch.full(
            (num_rows, width), -torch.inf, dtype=cache.dtype, device=cache.device
        ).triu_(last_start + 1)
        self._last_start = last_start

    def mask_at(self, start: int, num_rows: int) -> torch.Tensor:
        """Returns a view: the additive mask ``[num_rows, start + num_rows]`` of a chunk."""
        first = self._last_start - start
        return self._data[:num_rows, first : first + start + num_rows]


def plan_sequence(
    cache: KeyValueCache,
    slot: int,
    *,
    first_row: int,
    start: int,
    num_rows: int,
    groups: int,
    num_tokens: int | None = None,
    chunk_mask: ChunkMask | None = None,
    is_flash: bool = False,
) -> SequencePart:
    """Plans the attention of ``num_rows`` flattened rows at cache indices from ``start`` on.

    ``groups`` is the number of query heads that share a key-value head. ``num_tokens`` are read
    under a mask (None: up to the last row's token). ``chunk_mask`` has
    the mask of a prompt's chunks (None: made if needed). ``is_flash``: the device has the kernel
    of hippo.models.attention.flash.
    """
    end = start + num_rows
    is_grouped = num_rows <= MAX_GROUPED_ROWS
    is_causal = not is_grouped and start == 0
    mask, num_seen = None, num_tokens or end
    if is_flash:
        is_grouped = is_causal = False
    elif num_rows > 1 and not is_causal and not is_grouped and chunk_mask is not None:
        mask = chunk_mask.mask_at(start, num_rows)
    elif num_tokens is not None or (num_rows > 1 and not is_causal):
        width = -(-num_seen // MASK_ALIGNMENT) * MASK_ALIGNMENT
        mask = torch.full((num_rows, width), -torch.inf, dtype=cache.dtype, device=cache.device)
        mask.triu_(start + 1)
        if is_grouped:
            mask = mask.repeat_interleave(groups, 0)
        mask = mask[:, :num_seen]
    keys, values = cache.seen(slot, num_seen)
    return SequencePart(
        first_row=first_row,
        num_rows=num_rows,
        written=cache.written(slot, start, end),
        keys=keys,
        values=values,
        mask=mask,
        is_causal=is_causal,
        is_grouped=is_grouped,
        is_flash=is_flash,
    )


def plan_chunks(
    cache: KeyValueCache,
    slot: int,
    *,
    start: int,
    num_rows: int,
    chunk_rows: int,
    groups: int,
    is_flash: bool,
    marks: tuple[int, ...] = (),
) -> list[tuple[slice, AttentionPlan]]:
    """Cuts a prompt's rows, at cache indices from ``start`` on, into chunks of ``chunk_rows``, and
    returns the rows of each with its step; ``marks`` is StateRows.marks."""
    firsts = range(0, num_rows, chunk_rows)
    mask = None
    if start + firsts[-1] > 0 and not is_flash:
        most_rows = min(chunk_rows, num_rows)
        mask = ChunkMask(cache, num_rows=most_rows, last_start=start + firsts[-1])
    chunks = []
    for first in firsts:
        rows = slice(first, min(first + chunk_rows, num_rows))
        sequence = plan_sequence(
            cache,
            slot,
            first_row=0,
            start=start + first,
            num_rows=rows.stop - first,
            groups=groups,
            chunk_mask=mask,
            is_flash=is_flash,
        )
        count, is_first = rows.stop - first, first == 0
        own = StateRows(slot, 0, count, start + first, marks=marks, is_first=is_first)
        step = AttentionPlan((sequence,), cache.dtype, states=cache.states, state_rows=(own,))
        chunks.append((rows, step))
    return chunks


def attend(
    query: torch.Tensor, key_value: torch.Tensor, step: AttentionPlan, layer: int, scaling: float
) -> torch.Tensor:
    """Writes the rows' keys and values to the cache and attends, part by part.

    ``query`` is ``[rows, num_kv_heads, groups, head_dim]`` and ``key_value`` is
    ``[rows, 2, num_kv_heads, head_dim]``, both of the cache's dtype. The result is
    ``[rows, num_heads * head_dim]``, or one row with ``step.wants_last_row``. A tap keeps the
    queries of its rows.
    """
    if step.tap is not None:
        step.tap.keep_queries(layer, query)
    if step.wants_last_row:
        (sequence,) = step.sequences
        assert isinstance(sequence, SequencePart)
        sequence.write_cache(key_value, layer)
        last = replace(sequence, mask=None, is_causal=False, is_grouped=True)
        return last.read_cache(query[-1:], layer, scaling)
    if len(step.sequences) == 1 and not step.num_padding:
        return step.sequences[0].attend(query, key_value, layer, scaling)
    outputs = []
    for part in step.sequences:
        own_query = query.narrow(0, part.first_row, part.num_rows)
        own_key_value = key_value.narrow(0, part.first_row, part.num_rows)
        outputs.append(part.attend(own_query, own_key_value, layer, scaling))
    if step.num_padding:
        outputs.append(outputs[0].new_zeros(step.num_padding, outputs[0].shape[1]))
    return torch.cat(outputs)
