"""How the rows of a forward are laid out, and which of them come back."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hippo.models.linear import padded_rows
from hippo.models.rows import PlacedRows, lay_out


def placed(slot: int, num_rows: int) -> PlacedRows:
    """Rows whose ids and factors tell slot and row."""
    ids = tuple(100 * slot + row for row in range(num_rows))
    return PlacedRows(slot, 0, ids, torch.tensor(ids)[:, None])


@st.composite
def forwards(draw: st.DrawFn) -> tuple[list[PlacedRows], int]:
    """Sequences in any order of slots, and how many of the last ones are rests of prompts."""
    slots = draw(st.lists(st.integers(0, 20), min_size=1, max_size=8, unique=True))
    rows = [placed(slot, draw(st.integers(1, 40))) for slot in slots]
    return rows, draw(st.integers(0, len(slots)))


@given(forwards(), st.sampled_from([padded_rows, int]))
def test_all_rows_run_by_slot_and_those_that_are_wanted_come_back_as_asked(
    forward: tuple[list[PlacedRows], int], padded: type[int]
) -> None:
    asked, num_tails = forward
    layout = lay_out(asked, num_tails=num_tails, padded=padded)
    ids = list(layout.token_ids)
    num_rows = len(ids) - layout.num_padding
    assert ids[:num_rows] == sorted(id_ for rows in asked for id_ in rows.token_ids)
    assert len(ids) == padded(num_rows)

    whole, tails = asked[: len(asked) - num_tails], asked[len(asked) - num_tails :]
    expected = [id_ for rows in whole for id_ in rows.token_ids]
    expected += [rows.token_ids[-1] for rows in tails]
    taken = ids if layout.wanted is None else [ids[row] for row in layout.wanted]
    assert taken[: layout.num_wanted] == expected
    assert len(taken) == padded(layout.num_wanted)

    for rows in asked:
        first = layout.first_row(rows.slot)
        assert tuple(ids[first : first + rows.num_rows]) == rows.token_ids
    of_padding = torch.full((64, 1), -1)
    factors = layout.rotary(of_padding)[:, 0].tolist()
    assert factors == ids[:num_rows] + [-1] * layout.num_padding


def test_rows_in_order_of_slots_come_back_without_a_copy() -> None:
    assert lay_out([placed(1, 2), placed(3, 1)], num_tails=0, padded=int).wanted is None
    assert lay_out([placed(3, 1), placed(1, 2)], num_tails=0, padded=int).wanted is not None
