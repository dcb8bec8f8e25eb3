"""Attention over the in-place cache.

Rows of several sequences come flattened; each sequence's rows stand at the end of its own cached
tokens, so row k of n sees all but the last ``n - 1 - k`` of them (the causal rule aligned at the
bottom right).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import scaled_dot_product_attention

from hippo.models.batch import MASK_ALIGNMENT, BatchPart
from hippo.models.cache import KeyValueCache
from hippo.models.flash import attend_flash
from hippo.models.plan import MAX_GROUPED_ROWS


@dataclass(frozen=True, slots=True)
class SequencePart:
    """One sequence's rows of a forward and the stretch of the cache that they see.

    ``written``, ``keys`` and ``values`` hold a view of the cache a layer; the rows are the last
    tokens of the keys. ``mask`` is additive, or None when the rows see all (one row) or
    ``is_causal`` says what they see (the cache held nothing before them). With ``places``, rows go
    there and ``written`` is the whole slot. With ``is_flash`` there is no mask, and nothing else
    says what the rows see (hippo.models.flash).
    """

    first_row: int
    num_rows: int
    written: Sequence[torch.Tensor]  # [2, num_kv_heads, num_rows, head_dim]
    keys: Sequence[torch.Tensor]  # [num_kv_heads, 1, tokens, head_dim]
    values: Sequence[torch.Tensor]  # [num_kv_heads, 1, tokens, head_dim]
    mask: torch.Tensor | None  # [num_rows, tokens], or [num_rows * groups, tokens] if grouped
    is_causal: bool
    is_grouped: bool  # few rows: a group's query heads are rows of one product
    places: torch.Tensor | None = None  # int64 [num_rows], cache indices on the device
    is_flash: bool = False

    def attend(
        self, query: torch.Tensor, key_value: torch.Tensor, layer: int, scaling: float
    ) -> torch.Tensor:
        """Writes these rows' keys and values to the cache and attends, as BatchPart.attend."""
        self.write(key_value, layer)
        return self.read(query, layer, scaling)

    def write(self, key_value: torch.Tensor, layer: int) -> None:
        """Writes the rows' keys and values to the cache."""
        new = key_value.permute(1, 2, 0, 3)
        if self.places is None:
            self.written[layer].copy_(new)
        else:
            self.written[layer].index_copy_(2, self.places, new)

    def read(self, query: torch.Tensor, layer: int, scaling: float) -> torch.Tensor:
        """The rows' attention over what the cache holds."""
        key, value = self.keys[layer], self.values[layer]
        rows, num_kv_heads, groups, head_dim = query.shape
        if self.is_flash:
            return attend_flash(query, key, value, scaling)
        if self.is_grouped:
            # Keys are read once for all the heads that share them; nothing is repeated.
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
        # Many rows: heads stay apart, which lets the kernel skip what is causally out of sight.
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
    """Rows of a forward whose queries are kept, as attention uses them, for scoring afterwards."""

    rows: torch.Tensor  # int64 [num_tapped]
    queries: dict[int, list[torch.Tensor]]  # by layer: [num_tapped, num_heads, head_dim] a forward

    def keep(self, layer: int, query: torch.Tensor) -> None:
        """Adds the tapped rows of ``query`` (``[rows, num_kv_heads, groups, head_dim]``)."""
        self.queries.setdefault(layer, []).append(query[self.rows].flatten(1, 2))


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """One forward over the flattened rows of its sequences, in order; the last rows may be padding,
    which attends to nothing and is not cached.

    With ``wants_last_row`` all rows of the one sequence are cached, but a layer gives its last row
    only: all that is wanted of a prompt's last layer.
    """

    sequences: tuple[SequencePart | BatchPart, ...]
    dtype: torch.dtype  # the cache's, in which attention runs
    tap: QueryTap | None = None
    num_padding: int = 0
    wants_last_row: bool = False


class ChunkMask:
    """The causal mask of all chunks of a prompt, held once: a chunk's is a stretch of its columns.

    0 0 0 0 0 . . .     rows i of the last chunk, which begins at s: columns up to s + i
    0 0 0 0 0 0 . .     a chunk that begins at s - k: without the first k columns
    """

    def __init__(self, cache: KeyValueCache, *, num_rows: int, last_start: int) -> None:
        width = -(-(last_start + num_rows) // MASK_ALIGNMENT) * MASK_ALIGNMENT
        self._data = torch.full(
            (num_rows, width), -torch.inf, dtype=cache.dtype, device=cache.device
        ).triu_(last_start + 1)
        self._last_start = last_start

    def of(self, start: int, num_rows: int) -> torch.Tensor:
        """The additive mask ``[num_rows, start + num_rows]`` of the chunk at ``start``; a view."""
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
    chunk_mask: ChunkMask | None = None,
    is_flash: bool = False,
) -> SequencePart:
    """Places ``num_rows`` flattened rows at cache indices ``start`` and on.

    ``groups`` is the number of query heads that share a key-value head. ``chunk_mask`` is that of
    the prompt that the rows are a chunk of. ``is_flash``: the cache's device has that kernel.
    """
    end = start + num_rows
    is_grouped = num_rows <= MAX_GROUPED_ROWS
    is_causal = not is_grouped and start == 0
    mask = None
    if is_flash:
        is_grouped = is_causal = False
    elif num_rows > 1 and not is_causal and not is_grouped and chunk_mask is not None:
        mask = chunk_mask.of(start, num_rows)
    elif num_rows > 1 and not is_causal:
        width = -(-end // MASK_ALIGNMENT) * MASK_ALIGNMENT
        mask = torch.full((num_rows, width), -torch.inf, dtype=cache.dtype, device=cache.device)
        mask.triu_(start + 1)
        if is_grouped:
            mask = mask.repeat_interleave(groups, 0)
        mask = mask[:, :end]
    keys, values = cache.seen(slot, end)
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


def attend(
    query: torch.Tensor, key_value: torch.Tensor, step: AttentionPlan, layer: int, scaling: float
) -> torch.Tensor:
    """Writes the rows' keys and values to the cache and attends, one batch or sequence after
    another.

    ``query`` is ``[rows, num_kv_heads, groups, head_dim]``, ``key_value`` is
    ``[rows, 2, num_kv_heads, head_dim]``, both of the cache's dtype; gives
    ``[rows, num_heads * head_dim]``, or one row if the step wants the last one only. A tap
    keeps its rows' queries.
    """
    if step.tap is not None:
        step.tap.keep(layer, query)
    if step.wants_last_row:
        (sequence,) = step.sequences
        assert isinstance(sequence, SequencePart)
        sequence.write(key_value, layer)
        last = replace(sequence, mask=None, is_causal=False, is_grouped=True)  # it sees all
        return last.read(query[-1:], layer, scaling)
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
