"""How long prefills may hold up the sequences that run."""

from __future__ import annotations

import pytest

from hippo.engine.fairness import prefill_budget_ns

FORWARD_NS = 10_000_000


def budget(num_waiting: int, num_running: int, tokens_each: float = 1.0) -> float:
    return prefill_budget_ns(
        num_waiting=num_waiting,
        num_running=num_running,
        forward_ns=FORWARD_NS,
        tokens_each=tokens_each,
    )


def test_a_single_prefill_takes_little_from_many_running_sequences() -> None:
    assert budget(1, 8) == pytest.approx(FORWARD_NS / 2)


def test_more_waiting_sequences_get_more_and_more_running_ones_leave_less() -> None:
    assert budget(2, 8) > budget(1, 8) > budget(1, 16)


@pytest.mark.parametrize("num_waiting", [1, 7, 31])
def test_no_running_sequence_is_held_up_for_longer_than_two_of_its_forwards(
    num_waiting: int,
) -> None:
    assert budget(num_waiting, 1) == 2 * FORWARD_NS


def test_with_nobody_to_hold_up_the_inbox_is_looked_at_after_every_piece() -> None:
    assert budget(3, 0) == 0


def test_forwards_that_give_many_tokens_leave_more_time_for_prefills() -> None:
    assert budget(1, 8, tokens_each=3) == pytest.approx(3 * budget(1, 8))
    assert budget(7, 1, tokens_each=3) == 6 * FORWARD_NS


def test_a_forward_counts_as_four_at_most_and_as_one_at_least() -> None:
    assert budget(7, 1, tokens_each=20) == 8 * FORWARD_NS
    assert budget(7, 1, tokens_each=0) == 2 * FORWARD_NS
