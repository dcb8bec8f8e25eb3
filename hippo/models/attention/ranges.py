"""Attention of several sequences of any length in one call, by FlashAttention.

    rows      r0 r1 r2 | r3 | r4 r5          of three sequences
    prefix    slot 0: 0 .. 8999 | slot 3: 0 .. 211 | slot 4: 0 .. 4095       cached before the step
    block     r0 r1 r2 | r3 | r4 r5          causal, among the rows themselves

All rows of a sequence attend to the same prefix, without a mask. The rows and the query heads that
share a key-value head are therefore given to the kernel as the heads of one row, for which it reads
keys and values once. The rows' attention to each other is a second, small call. The two results are
averaged in float32, with their sums of exponentials as weights, and rounded once. If every sequence
has one row, that row is cached first, belongs to the prefix, and there is no second call.

The kernel reads the places and lengths of the sequences from the device, so that a CUDA graph
serves all slots and lengths (hippo.models.runners.captured).
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from hippo.models.attention.cache import CacheShape, KeyValueCache
from hippo.models.attention.flash import attend_ranges, why_no_flash
from hippo.models.attention.parts import AttentionPlan, Part, attend, plan_sequence
from hippo.models.attention.rows import PlacedRows
from hippo.models.interface.transfer import to_device
from hippo.models.products.kernels import difference_of

_log = logging.getLogger(__name__)

# Slots, starts and numbers of rows of the forwards that are tried: blocks, and single rows.
_TRIED = (((0, 150, 4), (1, 301, 2), (2, 3, 1)), ((0, 150, 1), (1, 301, 1), (2, 3, 1)))


@dataclass(frozen=True, slots=True)
class EqualRows:
    """Gives each sequence the same number of rows, by repeating its last row."""

    filled: torch.Tensor  # int64 [num_sequences * most_rows]: the row at each place
    taken: torch.Tensor  # int64 [num_rows]: the place of each row


@dataclass(frozen=True, slots=True)
class RangesPart:
    """The rows of several sequences; see the module for how they attend."""

    first_row: int
    num_rows: int
    cache: KeyValueCache
    most_rows: int  # that a sequence has
    most_tokens: int  # that a sequence's prefix has
    places: torch.Tensor  # int64 [num_rows]: indices in the cache's rows
    units: torch.Tensor  # int32 [num_sequences + 1]: 0, 1, 2 ..
    starts: torch.Tensor  # int32 [num_sequences + 1]: index of the first token in the cache's rows
    lengths: torch.Tensor  # int32 [num_sequences]: tokens of the prefix
    bounds: torch.Tensor  # int32 [num_sequences + 1]: the first row of each sequence
    equal: EqualRows | None = None  # None: the sequences have the same number of rows

    def attend(
        self, query: torch.Tensor, key_value: torch.Tensor, layer: int, scaling: float
    ) -> torch.Tensor:
        """See Part.attend in hippo.models.attention.parts."""
        self.cache.rows[layer].index_copy_(0, self.places, key_value)
        heads = query.flatten(1, 2)
        if self.most_rows == 1:
            return self._attend_prefix(heads, layer, scaling)[0].flatten(1)
        if self.equal is not None:
            query = query.index_select(0, self.equal.filled)
        by_sequence = query.view(-1, self.most_rows, *query.shape[1:]).transpose(1, 2)
        as_one_row = by_sequence.flatten(1, 3)  # heads in order of kv head, row, group
        prefix, prefix_sums = self._attend_prefix(as_one_row, layer, scaling)
        prefix = prefix.view(by_sequence.shape).transpose(1, 2)
        # [num_sequences, most_rows, num_kv_heads, groups], as prefix without the last dimension
        prefix_sums = prefix_sums.T.view(by_sequence.shape[:-1]).transpose(1, 2)
        if self.equal is not None:
            prefix = prefix.flatten(0, 1).index_select(0, self.equal.taken)
            prefix_sums = prefix_sums.flatten(0, 1).index_select(0, self.equal.taken)
        key, value = key_value.unbind(1)
        block, block_sums = attend_ranges(
            heads,
            key,
            value,
            bounds=self.bounds,
            starts=self.bounds,
            most_rows=self.most_rows,
            most_tokens=self.most_rows,
            is_causal=True,
            scaling=scaling,
        )
        weight = torch.sigmoid(prefix_sums - block_sums.T.view(prefix_sums.shape)).unsqueeze(-1)
        # block + weight * prefix - weight * block, in float32; rounded once, to the block's dtype.
        merged = block.view(prefix.shape)
        total = torch.addcmul(merged, weight, prefix)
        torch.addcmul(total, weight, merged, value=-1, out=merged)
        return merged.reshape(self.num_rows, -1)

    def _attend_prefix(
        self, query: torch.Tensor, layer: int, scaling: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attends to cached tokens; ``query`` is ``[num_sequences, heads, head_dim]``."""
        key, value = self.cache.keys_and_values[layer]
        return attend_ranges(
            query,
            key,
            value,
            bounds=self.units,
            starts=self.starts,
            lengths=self.lengths,
            most_rows=1,
            most_tokens=self.most_tokens,
            is_causal=False,
            scaling=scaling,
        )


def plan_ranges(cache: KeyValueCache, rows: Sequence[PlacedRows], *, first_row: int) -> RangesPart:
    """Plans the attention of sequences whose rows follow each other from ``first_row`` on; each has
    cached tokens before them."""
    counts = [each.num_rows for each in rows]
    most_rows = max(counts)
    bounds = [0, *accumulate(counts)]
    lengths = [each.end if most_rows == 1 else each.start for each in rows]
    assert min(lengths) > 0, "a prompt is cached before a step"
    starts = [cache.row_of(each.slot, 0) for each in rows]
    lists = [range(len(rows) + 1), [*starts, 0], lengths, bounds]
    small = to_device([number for each in lists for number in each], cache.device).int()
    units_at, starts_at, lengths_at, bounds_at = torch.split(small, [len(each) for each in lists])
    places = [
        start + place
        for start, each in zip(starts, rows, strict=True)
        for place in range(each.start, each.end)
    ]
    filled: list[int] = []
    taken: list[int] = []
    if min(counts) < most_rows:
        for first, count in zip(bounds, counts, strict=False):
            taken += range(len(filled), len(filled) + count)
            filled += [first + min(row, count - 1) for row in range(most_rows)]
    indices = to_device([*places, *filled, *taken], cache.device)
    places_at, filled_at, taken_at = torch.split(indices, [len(places), len(filled), len(taken)])
    return RangesPart(
        first_row=first_row,
        num_rows=len(places),
        cache=cache,
        most_rows=most_rows,
        most_tokens=max(lengths),
        places=places_at,
        units=units_at,
        starts=starts_at,
        lengths=lengths_at,
        bounds=bounds_at,
        equal=EqualRows(filled_at, taken_at) if filled else None,
    )


@dataclass(frozen=True, slots=True)
class FlashUse:
    """Which attention FlashAttention computes: a single sequence's, and several sequences'
    (RangesPart). ``reason`` says why one of them is not."""

    has_flash: bool
    has_ranges: bool
    reason: str = ""


def find_flash(cache: KeyValueCache, groups: int) -> FlashUse:
    """Returns what the cache's device has; logs a warning if it has FlashAttention, but RangesPart
    does not give the results of plain attention. ``groups`` query heads share a key-value head."""
    reason = why_no_flash(cache, groups)
    if reason is not None:
        return FlashUse(has_flash=False, has_ranges=False, reason=reason)
    for tried in _TRIED:
        reason = _difference(cache, groups, tried)
        if reason is not None:
            _log.warning(
                "attention of several sequences uses masks, not FlashAttention: %s", reason
            )
            return FlashUse(has_flash=True, has_ranges=False, reason=f"it fails here: {reason}")
    return FlashUse(has_flash=True, has_ranges=True)


def _difference(
    cache: KeyValueCache, groups: int, tried: Sequence[tuple[int, int, int]]
) -> str | None:
    """Returns how RangesPart differs from attention with masks on such rows, or why it fails; None
    if the results agree."""
    num_heads, head_dim = cache.shape.num_kv_heads, cache.shape.head_dim
    capacity = max(start + count for _, start, count in tried)
    shape = CacheShape(
        num_layers=1,
        num_slots=len(tried),
        num_kv_heads=num_heads,
        capacity=capacity,
        head_dim=head_dim,
    )
    rows = [PlacedRows(slot, start, (0,) * count, torch.empty(0)) for slot, start, count in tried]
    firsts = [0, *accumulate(each.num_rows for each in rows)]
    generator = torch.Generator().manual_seed(0)

    def numbers(*size: int) -> torch.Tensor:
        drawn = torch.randn(*size, head_dim, generator=generator)
        return to_device(drawn, cache.device).to(cache.dtype)

    def run(dtype: torch.dtype, plan: Callable[[KeyValueCache], Sequence[Part]]) -> torch.Tensor:
        own = KeyValueCache(shape, dtype=dtype, device=cache.device)
        for slot in range(shape.num_slots):
            own.written(slot, 0, capacity)[0].copy_(cached)
        step = AttentionPlan(tuple(plan(own)), dtype)
        return attend(query.to(dtype), key_value.to(dtype), step, 0, head_dim**-0.5)

    def with_masks(own: KeyValueCache) -> list[Part]:
        return [
            plan_sequence(own, slot, first_row=first, start=start, num_rows=count, groups=groups)
            for first, (slot, start, count) in zip(firsts, tried, strict=False)
        ]

    with torch.inference_mode():
        cached = numbers(2, num_heads, capacity)
        key_value, query = numbers(firsts[-1], 2, num_heads), numbers(firsts[-1], num_heads, groups)
        try:
            found = run(cache.dtype, lambda own: [plan_ranges(own, rows, first_row=0)])
            expected = run(torch.float32, with_masks)
        except RuntimeError as error:
            return str(error).splitlines()[0]
    return difference_of(found, expected, cache.dtype)
