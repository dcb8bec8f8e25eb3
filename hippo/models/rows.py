"""The rows of a forward: where those of each sequence go, and how they are laid out for the layers.

asked for    | slot 5: r0 r1 | slot 2: r2 |
laid out     | r2 | r0 r1 | padding |     in order of slots, for attention
given back   | r0 | r1 | r2 |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

_LEAST_LAYER_GROUPS = 8  # of a prefill, which can be left between two of their chunks
_GROUP_ROWS = 256  # prompt rows for which that many groups are short enough


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """Tokens to feed to one sequence, with where they go."""

    slot: int
    start: int  # cache index of the first
    token_ids: tuple[int, ...]
    rotary: torch.Tensor  # [num_rows, ...], in the stack's own form

    @property
    def num_rows(self) -> int:
        """Tokens to feed."""
        return len(self.token_ids)

    @property
    def end(self) -> int:
        """Cached tokens with these."""
        return self.start + self.num_rows


@dataclass(frozen=True, slots=True)
class RowLayout:
    """All rows of a forward, one sequence after another in order of slots, padding last."""

    by_slot: Sequence[PlacedRows]
    token_ids: Sequence[int]
    num_padding: int
    wanted: (
        Sequence[int] | None
    )  # whose logits, in the order asked for; None: all, in order of slots
    num_wanted: int  # the rest is padding

    def rotary(self) -> torch.Tensor:
        """The factors of all rows; padding has those of the last row."""
        parts = [rows.rotary for rows in self.by_slot]
        if self.num_padding:
            last = parts[-1][-1:]
            parts.append(last.expand(self.num_padding, *last.shape[1:]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class Runner(Protocol):
    """Runs rows of several sequences that are placed in the cache: as they come
    (hippo.models.eager), or in few fixed shapes (hippo.models.fixed)."""

    def forward(self, sequences: Sequence[PlacedRows]) -> torch.Tensor:
        """Float32 logits ``[all rows, num_token_ids]``, in the order asked for; valid until the
        next call."""


def lay_out(placed: Sequence[PlacedRows], *, padded: Callable[[int], int]) -> RowLayout:
    """The layout of one sequence after another; ``padded`` says how many rows a number of rows is
    filled up to."""
    by_slot = sorted(placed, key=lambda rows: rows.slot)
    token_ids = [token_id for rows in by_slot for token_id in rows.token_ids]
    num_rows = num_wanted = len(token_ids)
    wanted = None
    if any(one is not other for one, other in zip(placed, by_slot, strict=True)):
        wanted = _wanted_rows(placed, by_slot)
        wanted += [0] * (padded(num_wanted) - num_wanted)
    num_padding = padded(num_rows) - num_rows
    token_ids += [0] * num_padding
    return RowLayout(by_slot, token_ids, num_padding, wanted, num_wanted)


def _wanted_rows(placed: Sequence[PlacedRows], by_slot: Sequence[PlacedRows]) -> list[int]:
    """Where each row of ``placed`` stands among those by slot."""
    firsts, num_rows = {}, 0
    for rows in by_slot:
        firsts[rows.slot] = num_rows
        num_rows += rows.num_rows
    assert len(firsts) == len(placed), "a slot is stepped once"
    return [firsts[one.slot] + row for one in placed for row in range(one.num_rows)]


def layer_groups(num_layers: int, num_tapped: int, num_rows: int) -> list[int]:
    """The layers at which the groups of a prefill of ``num_rows`` begin and end, in order; one of
    them ends behind the first ``num_tapped``."""
    num_groups = min(_LEAST_LAYER_GROUPS * -(-num_rows // _GROUP_ROWS), num_layers)
    num_groups = max(num_groups, _LEAST_LAYER_GROUPS)
    bounds = {round(num_layers * i / num_groups) for i in range(num_groups)}
    return sorted(bounds | {num_tapped, num_layers - 1, num_layers})
