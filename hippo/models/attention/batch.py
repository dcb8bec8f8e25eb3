"""Attention of several sequences in one call: the sequences of neighbouring slots form a batch.

    slots    | 3        | 4        | 5        |   a range of the cache, viewed without a copy
    rows     | r0 r1    |          | r2 r3 r4 |   slot 4 has no rows
    batch    | r0 r1 r1 | r0 r0 r0 | r2 r3 r4 |   the same number of rows for every slot
    tokens   | 0 .. 181 | 0 .. 181 | 0 .. 181 |   up to the last token of the longest sequence

Filler rows attend like other rows, and their output is dropped. A batch saves calls and adds
arithmetic, so ``group_rows`` ends a batch where the filler would cost more than a call. A GPU with
FlashAttention needs no batches (hippo.models.attention.ranges).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from hippo.models.attention.cache import KeyValueCache
from hippo.models.attention.rows import PlacedRows
from hippo.models.interface.plan import MAX_GROUPED_ROWS
from hippo.models.interface.transfer import to_device

MASK_ALIGNMENT = 16  # columns; kernels on a GPU copy a mask whose rows are not aligned

# Scores (rows times tokens) that take as long as the calls for one more sequence. On one CPU core,
# measured: 11 us of calls against 26 ns for a score of five heads; half of that number, so that a
# batch is faster.
_SCORES_OF_CALLS = 200


def group_rows(rows: Sequence[PlacedRows]) -> list[list[PlacedRows]]:
    """Groups rows, which are in order of slots, by the attention call that computes them."""
    groups: list[list[PlacedRows]] = []
    for each in rows:
        if groups and _is_worth_batching([*groups[-1], each]):
            groups[-1].append(each)
        else:
            groups.append([each])
    return groups


def _is_worth_batching(rows: Sequence[PlacedRows]) -> bool:
    num_slots = rows[-1].slot - rows[0].slot + 1
    most = max(each.num_rows for each in rows)
    scores = num_slots * most * max(each.end for each in rows)
    wanted = sum(each.num_rows * each.end for each in rows)
    return most <= MAX_GROUPED_ROWS and scores - wanted <= _SCORES_OF_CALLS * (len(rows) - 1)


@dataclass(frozen=True, slots=True)
class BatchPart:
    """The rows of several sequences in neighbouring slots; see the module for their layout."""

    first_row: int
    num_rows: int
    written: Sequence[torch.Tensor]  # by layer: [num_slots, places, 2, num_kv_heads, head_dim]
    keys: Sequence[torch.Tensor]  # by layer: [num_slots, num_kv_heads, tokens, head_dim]
    values: Sequence[torch.Tensor]
    places: tuple[torch.Tensor, torch.Tensor]  # int64 [num_rows]: slot (first is 0), cache index
    filled: torch.Tensor  # int64 [num_slots * rows each]: the row at each place of the batch
    taken: torch.Tensor  # int64 [num_rows]: the place of each row in the batch
    mask: torch.Tensor  # additive [num_slots, 1, rows each * groups, tokens]

    def attend(
        self, query: torch.Tensor, key_value: torch.Tensor, layer: int, scaling: float
    ) -> torch.Tensor:
        """See Part.attend in hippo.models.attention.parts."""
        self.written[layer][self.places] = key_value
        key, value = self.keys[layer], self.values[layer]
        num_slots = key.shape[0]
        _, num_kv_heads, groups, head_dim = query.shape
        batched = query.index_select(0, self.filled).view(
            num_slots, -1, num_kv_heads, groups, head_dim
        )
        rows_each = batched.shape[1]
        output = scaled_dot_product_attention(
            batched.transpose(1, 2).reshape(num_slots, num_kv_heads, rows_each * groups, head_dim),
            key,
            value,
            attn_mask=self.mask,
            scale=scaling,
        )
        # Kernels differ in the layout of their output: only a head's values are always contiguous.
        by_row = output.view(num_slots, num_kv_heads, rows_each, groups, head_dim).transpose(1, 2)
        return by_row.reshape(num_slots * rows_each, -1).index_select(0, self.taken)


def plan_batch(
    cache: KeyValueCache, rows: Sequence[PlacedRows], *, first_row: int, groups: int
) -> BatchPart:
    """Plans the attention of sequences in ascending slots, whose rows follow each other from
    ``first_row`` on; ``groups`` is the number of query heads that share a key-value head."""
    first_slot, num_slots = rows[0].slot, rows[-1].slot - rows[0].slot + 1
    rows_each = max(each.num_rows for each in rows)
    num_tokens = max(each.end for each in rows)
    filled = [0] * (num_slots * rows_each)
    seen = [0] * (num_slots * rows_each)  # last cache index that the row may attend to
    slots: list[int] = []
    places: list[int] = []
    taken: list[int] = []
    for each in rows:
        cache.zero_unwritten(each.slot, each.start, num_tokens)
        slot = each.slot - first_slot
        first, stands = len(places), slot * rows_each
        for row in range(rows_each):
            own = min(row, each.num_rows - 1)  # the last row is the filler
            filled[stands + row] = first + own
            seen[stands + row] = each.start + own
        slots += [slot] * each.num_rows
        places += range(each.start, each.end)
        taken += range(stands, stands + each.num_rows)
    device = cache.device
    lists = (filled, seen, slots, places, taken)
    joined = to_device([number for each in lists for number in each], device)
    filled_at, seen_at, slot_at, place_at, taken_at = torch.split(
        joined, [len(each) for each in lists]
    )
    width = -(-num_tokens // MASK_ALIGNMENT) * MASK_ALIGNMENT
    columns = torch.arange(width, device=device)
    mask = torch.zeros(num_slots * rows_each, 1, width, dtype=cache.dtype, device=device)
    mask = mask.masked_fill_((columns > seen_at[:, None])[:, None], -torch.inf)
    mask = mask.expand(-1, groups, -1).reshape(num_slots, 1, rows_each * groups, width)
    keys, values = cache.seen_together(first_slot, num_slots, num_tokens)
    return BatchPart(
        first_row=first_row,
        num_rows=len(places),
        written=cache.written_together(first_slot, num_slots),
        keys=keys,
        values=values,
        places=(slot_at, place_at),
        filled=filled_at,
        taken=taken_at,
        mask=mask[..., :num_tokens],
    )
