"""The rows of a forward: their places in the cache, and their order for the layers.

requested    | slot 5: r0 r1 | slot 2: r2 |
laid out     | r2 | r0 r1 | padding |     in order of slots, for attention
returned     | r0 | r1 | r2 |
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from hippo.catalog.sizes import LEAST_LAYER_GROUPS
from hippo.models.attention.states import StateRows

_GROUP_ROWS = 256  # prompt rows up to which that many groups are short enough


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """Tokens to feed to one sequence, and their places in the cache."""

    slot: int
    start: int  # cache index of the first token
    token_ids: tuple[int, ...]
    rotary: torch.Tensor  # [num_rows, 1, num_rotated / 2], see DecoderStack.rotary
    least_start: int | None = None  # no later step begins before; None: not before this one

    @property
    def num_rows(self) -> int:
        """Number of tokens to feed."""
        return len(self.token_ids)

    @property
    def end(self) -> int:
        """Number of cached tokens after this forward."""
        return self.start + self.num_rows

    def state_rows(self, first_row: int, places: range | None = None) -> StateRows:
        """Returns these rows, or those at ``places``, for the layers that have a state."""
        places = range(self.start, self.end) if places is None else places
        least = self.start if self.least_start is None else self.least_start
        return StateRows(self.slot, first_row, len(places), places.start, least)


@dataclass(frozen=True, slots=True)
class RowLayout:
    """All rows of a forward, one sequence after another in order of slots, padding last."""

    by_slot: Sequence[PlacedRows]
    token_ids: Sequence[int]
    num_padding: int
    # Rows whose logits are needed, in the requested order, then padding; None: all rows in order.
    wanted: Sequence[int] | None
    num_wanted: int  # without padding

    def rotary(self) -> torch.Tensor:
        """Returns the rotary factors of all rows; padding has the factors of the last row."""
        parts = [rows.rotary for rows in self.by_slot]
        if self.num_padding:
            last = parts[-1][-1:]
            parts.append(last.expand(self.num_padding, *last.shape[1:]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def state_rows(self) -> tuple[StateRows, ...]:
        """Returns the rows for the layers that have a state."""
        firsts = accumulate((rows.num_rows for rows in self.by_slot), initial=0)
        return tuple(
            rows.state_rows(first) for rows, first in zip(self.by_slot, firsts, strict=False)
        )


def lay_out(placed: Sequence[PlacedRows], *, padded: Callable[[int], int]) -> RowLayout:
    """Lays sequences out in order of slots; ``padded`` maps a number of rows to the number of rows
    to run, padding included."""
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
    """Returns the index of each row of ``placed`` among the rows by slot."""
    firsts, num_rows = {}, 0
    for rows in by_slot:
        firsts[rows.slot] = num_rows
        num_rows += rows.num_rows
    assert len(firsts) == len(placed), "a slot is stepped once"
    return [firsts[one.slot] + row for one in placed for row in range(one.num_rows)]


def layer_groups(num_layers: int, num_tapped: int, num_rows: int, num_added: int = 0) -> list[int]:
    """Returns the layers at which the groups of a prefill of ``num_rows`` begin and end, ascending;
    one group ends behind the first ``num_tapped`` layers, and one behind each of the first
    ``num_added``."""
    num_groups = min(LEAST_LAYER_GROUPS * -(-num_rows // _GROUP_ROWS), num_layers)
    num_groups = max(num_groups, LEAST_LAYER_GROUPS)
    bounds = {round(num_layers * i / num_groups) for i in range(num_groups)}
    first = range(min(num_added, num_layers) + 1)  # shallow models have fewer layers than features
    return sorted(bounds | {*first, num_tapped, num_layers - 1, num_layers})
