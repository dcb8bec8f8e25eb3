"""How long prefills may hold up the sequences that run."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hippo.engine.fairness import PrefillShare, prefill_budget_ns

FORWARD_NS = 10_000_000


def budget(
    num_waiting: int,
    num_running: int,
    tokens_each: float = 1.0,
    *,
    delays_others: bool = False,
) -> float:
    return prefill_budget_ns(
        num_waiting=num_waiting,
        num_running=num_running,
        forward_ns=FORWARD_NS,
        tokens_each=tokens_each,
        delays_others=delays_others,
    )


def test_a_single_prefill_takes_little_from_many_running_sequences() -> None:
    assert budget(1, 8) == pytest.approx(FORWARD_NS / 2)


@pytest.mark.parametrize("num_waiting", [1, 7, 31])
def test_no_running_sequence_is_held_up_for_longer_than_two_of_its_forwards(
    num_waiting: int,
) -> None:
    assert budget(num_waiting, 1) == 2 * FORWARD_NS


def test_forwards_that_give_many_tokens_leave_more_time_for_prefills() -> None:
    assert budget(1, 8, tokens_each=3) == pytest.approx(3 * budget(1, 8))
    assert budget(7, 1, tokens_each=3) == 6 * FORWARD_NS


def test_a_forward_counts_as_four_at_most_and_as_one_at_least() -> None:
    assert budget(7, 1, tokens_each=20) == 8 * FORWARD_NS
    assert budget(7, 1, tokens_each=0) == 2 * FORWARD_NS


def test_prefills_take_two_thirds_of_a_forward_from_other_clients() -> None:
    assert budget(7, 1, tokens_each=4, delays_others=True) == pytest.approx(2 / 3 * FORWARD_NS)
    assert budget(1, 8, delays_others=True) == pytest.approx(FORWARD_NS / 2)


@settings(max_examples=200)
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
