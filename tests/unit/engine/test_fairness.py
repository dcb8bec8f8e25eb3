"""How long prefills may hold up the sequences that run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hippo.engine.fairness import PrefillShare

FORWARD_NS = 10_000_000


@pytest.mark.parametrize(
    ("num_waiting", "num_running", "tokens_each", "delays_others", "num_forwards"),
    [
        (1, 8, 1, False, 0.5),  # a single prefill takes little from many running sequences
        (1, 1, 1, False, 2),  # no sequence is held up for longer than two of its forwards
        (31, 1, 1, False, 2),
        (1, 8, 3, False, 1.5),  # forwards that give many tokens leave more time for prefills
        (7, 1, 3, False, 6),
        (7, 1, 20, False, 8),  # a forward counts as four at most, and as one at least
        (7, 1, 0, False, 2),
        (7, 1, 4, True, 2 / 3),  # prefills take two thirds of a forward from other clients
        (1, 8, 1, True, 0.5),
    ],
)
def test_a_prefills_budget_in_forwards(
    num_waiting: int, num_running: int, tokens_each: float, delays_others: bool, num_forwards: float
) -> None:
    share, tokens = PrefillShare(), round(tokens_each * num_running)
    share.count_forward(FORWARD_NS, ["alice"] * num_running, tokens)
    assert share.allows("mallory" if delays_others else "alice", num_waiting=num_waiting)
    assert share.budget_ns == pytest.approx(num_forwards * FORWARD_NS)


@given(
    pieces_ns=st.lists(st.integers(FORWARD_NS // 4, 50 * FORWARD_NS), min_size=300, max_size=300),
    forwards_ns=st.lists(st.integers(FORWARD_NS // 10, FORWARD_NS), min_size=50, max_size=50),
)
def test_pieces_of_any_length_take_no_more_than_their_share(
    pieces_ns: list[int], forwards_ns: list[int]
) -> None:
    share, pieces = PrefillShare(), iter(pieces_ns)
    total_ns = longest_ns = 0
    for forward_ns in forwards_ns:
        share.count_forward(forward_ns, ["alice"], 1)
        while share.allows("mallory", num_waiting=1):
            piece_ns = next(pieces)
            share.count_piece(piece_ns)
            total_ns, longest_ns = total_ns + piece_ns, max(longest_ns, piece_ns)
    share_ns = 2 / 3 * sum(forwards_ns)
    assert share_ns - max(forwards_ns) <= total_ns <= share_ns + longest_ns


@pytest.mark.parametrize(
    ("client", "expected"), [("mallory", [True, False, False] * 3), ("alice", [True] * 9)]
)
def test_what_a_piece_of_others_takes_too_long_is_paid_by_the_next_forwards(
    client: str, expected: list[bool]
) -> None:
    share, turns = PrefillShare(), []
    for _ in range(9):
        share.count_forward(FORWARD_NS, ["alice"], 1)
        turns.append(share.allows(client, num_waiting=1))
        if turns[-1]:
            share.count_piece(2 * FORWARD_NS)
    assert turns == expected


def test_while_no_sequence_runs_one_piece_runs_in_a_turn() -> None:
    share = PrefillShare()
    for _ in range(2):
        assert share.allows("alice", num_waiting=1)
        share.count_piece(100 * FORWARD_NS)
        assert not share.allows("alice", num_waiting=1)
        share.count_no_forward()
