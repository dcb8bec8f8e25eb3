"""How the rows of a forward are laid out, and which of them come back."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hippo.models.attention.rows import PlacedRows, lay_out
from hippo.models.products.linear import padded_rows


def placed(slot: int, num_rows: int) -> PlacedRows:
    """Rows whose ids and factors tell slot and row."""
    ids = tuple(100 * slot + row for row in range(num_rows))
    return PlacedRows(slot, 0, ids, torch.tensor(ids)[:, None])


@st.composite
def forwards(draw: st.DrawFn) -> list[PlacedRows]:
    """Sequences in any order of slots."""
    slots = draw(st.lists(st.integers(0, 20), min_size=1, max_size=8, unique=True))
    return [placed(slot, draw(st.integers(1, 40))) for slot in slots]


@given(forwards(), st.sampled_from([padded_rows, int]))
def test_all_rows_run_by_slot_and_those_that_are_wanted_come_back_as_asked(
    asked: list[PlacedRows], padded: type[int]
) -> None:
    layout = lay_out(asked, padded=padded)
    ids = list(layout.token_ids)
    num_rows = len(ids) - layout.num_padding
    assert ids[:num_rows] == sorted(id_ for rows in asked for id_ in rows.token_ids)
    assert len(ids) == padded(num_rows)

    expected = [id_ for rows in asked for id_ in rows.token_ids]
    taken = ids if layout.wanted is None else [ids[row] for row in layout.wanted]
    assert taken[: layout.num_wanted] == expected
    assert len(taken) == padded(layout.num_wanted)

    factors = layout.rotary()[:, 0].tolist()
    assert factors == ids[:num_rows] + [ids[num_rows - 1]] * layout.num_padding


def test_rows_in_order_of_slots_come_back_without_a_copy() -> None:
    assert lay_out([placed(1, 2), placed(3, 1)], padded=int).wanted is None
    assert lay_out([placed(3, 1), placed(1, 2)], padded=int).wanted is not None
