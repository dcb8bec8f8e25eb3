"""Forwards of any number of rows, whose operations are launched one by one."""

import itertools
from collections.abc import Callable, Sequence

import torch

from hippo.models.attention.batch import group_rows, plan_batch
from hippo.models.attention.cache import KeyValueCache
from hippo.models.attention.parts import AttentionPlan, Part, plan_sequence
from hippo.models.attention.ranges import FlashUse, plan_ranges
from hippo.models.attention.rows import PlacedRows, lay_out
from hippo.models.interface.plan import MAX_GROUPED_ROWS
from hippo.models.interface.transfer import to_device
from hippo.models.runners.decoder import DecoderStack


class EagerRunner:
    """Runs the rows of several sequences, in any number.

    ``padded`` maps a number of rows to the number of rows to run, padding included.
    """

    def __init__(
        self,
        stack: DecoderStack,
        cache: KeyValueCache,
        embedding: torch.Tensor,
        flash: FlashUse,
        *,
        padded: Callable[[int], int],
    ) -> None:
        self._stack = stack
        self._cache = cache
        self._embedding = embedding
        self._padded = padded
        self.has_flash = flash.has_flash
        self._has_ranges = flash.has_ranges

    def forward(self, sequences: Sequence[PlacedRows]) -> torch.Tensor:
        """Returns float32 logits ``[all rows, num_token_ids]``, in the order of ``sequences``."""
        rows = lay_out(sequences, padded=self._padded)
        device = self._embedding.device
        # Copied before any layer is queued: a later copy would wait for the queued layers.
        token_ids = to_device(rows.token_ids, device)
        wanted = None if rows.wanted is None else to_device(rows.wanted, device)
        hidden = torch.embedding(self._embedding, token_ids)
        plan = AttentionPlan(
            self._parts(rows.by_slot),
            self._cache.dtype,
            num_padding=rows.num_padding,
            states=self._cache.states,
            state_rows=rows.state_rows() if self._cache.states else (),
        )
        hidden = self._stack.run(hidden, rows.rotary(), plan, 0, self._stack.num_layers)
        if wanted is not None:
            hidden = hidden.index_select(0, wanted)
        return self._stack.logits(hidden)[: rows.num_wanted]

    def _parts(self, by_slot: Sequence[PlacedRows]) -> tuple[Part, ...]:
        """Returns the parts whose attention is computed in one call each, in order of slots."""
        parts: list[Part] = []
        first_row = 0
        for group in self._groups(by_slot):
            part: Part
            if self._has_ranges_for(group[0]):
                part = plan_ranges(self._cache, group, first_row=first_row)
            elif len(group) > 1:
                part = plan_batch(self._cache, group, first_row=first_row)
            else:
                part = plan_sequence(
                    self._cache,
                    group[0].slot,
                    first_row=first_row,
                    start=group[0].start,
                    num_rows=group[0].num_rows,
                    groups=self._stack.groups,
                    is_flash=self.has_flash,
                )
            parts.append(part)
            first_row += part.num_rows
        return tuple(parts)

    def _groups(self, by_slot: Sequence[PlacedRows]) -> list[list[PlacedRows]]:
        """Groups sequences by attention call: with RangesPart all neighbours of few rows."""
        if not self._has_ranges:
            return group_rows(by_slot)
        groups: list[list[PlacedRows]] = []
        for has_ranges, group in itertools.groupby(by_slot, key=self._has_ranges_for):
            together = list(group)
            groups += [together] if has_ranges else [[rows] for rows in together]
        return groups

    def _has_ranges_for(self, rows: PlacedRows) -> bool:
        return self._has_ranges and rows.num_rows <= MAX_GROUPED_ROWS
