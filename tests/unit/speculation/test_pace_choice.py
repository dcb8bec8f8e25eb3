"""How long blocks and forwards get, by what steps, rows and messages cost."""

from __future__ import annotations

import pytest

from hippo.speculation.estimates import Acceptance, Latency, PairTimes
from hippo.speculation.pace_choice import PaceChoice
from hippo.types import Pace, Timing

MS = 1_000_000


def make_times(
    *, step_ms: float, row_ms: float = 0.25, message_ms: float = 0.0, num_sequences: int = 1
) -> PairTimes:
    """A target that takes 7 ms and ``row_ms`` a row, and a draft."""
    latency = Latency(draft_step_ns=step_ms * MS, first_token_ns=2 * MS, message_ns=message_ms * MS)
    times = PairTimes(latency=latency, num_sequences=num_sequences)
    times.acceptance = Acceptance(prior=0.98, prior_weight=100)
    for rows in (1, 2, 4, 8, 12, 16, 24, 33):
        for _ in range(20):
            forward_ns = round((7 + row_ms * rows * num_sequences) * MS)
            timing = Timing(
                forward_ns=forward_ns,
                num_sequences=num_sequences,
                num_batch_rows=rows * num_sequences,
            )
            times.observe_forward(rows, timing)
    return times


def chosen(times: PairTimes, *, rate: float = 0.98, is_heard: bool = True) -> Pace:
    acceptance = Acceptance(prior=rate, prior_weight=100)
    choice = PaceChoice(32, times, acceptance)
    choice.choose(is_anew=True)
    return choice.pace(is_heard=is_heard, is_proven=True)


def test_blocks_are_short_where_messages_cost_the_draft_nothing() -> None:
    assert chosen(make_times(step_ms=2.0)).block_size == 1


def test_blocks_grow_with_what_a_message_costs_the_draft() -> None:
    sizes = [chosen(make_times(step_ms=1.0, message_ms=ms)).block_size for ms in (0, 0.5, 0.8, 1.2)]
    assert sizes == sorted(sizes)
    assert sizes[0] <= 2 and sizes[-1] == 12


@pytest.mark.parametrize(("rate", "most"), [(0.99, 16), (0.95, 12), (0.9, 6), (0.5, 1)])
def test_blocks_are_no_longer_than_what_is_mostly_right(rate: float, most: int) -> None:
    times = make_times(step_ms=0.5, message_ms=3)
    assert chosen(times, rate=rate).block_size <= most


def test_a_block_is_there_before_the_target_has_waited_for_long() -> None:
    size = chosen(make_times(step_ms=2.5, message_ms=20)).block_size
    assert size == 8  # the most that the draft makes in three steps of 7 ms


def test_under_load_blocks_stay_short() -> None:
    assert chosen(make_times(step_ms=0.5, message_ms=5, num_sequences=8)).block_size <= 8


def test_the_target_waits_for_long_blocks_and_not_for_a_silent_draft() -> None:
    times = make_times(step_ms=1.0, message_ms=2)
    pace = chosen(times)
    assert pace.block_size > 4
    assert pace.optimistic.min_draft_tokens == 1
    assert pace.optimistic.wait_ns > pace.block_size * MS
    assert pace.optimistic.wait_ns < 30 * MS  # a few steps of the target
    assert chosen(times, is_heard=False).optimistic.min_draft_tokens == 0


def test_of_equally_good_lengths_the_longest_is_chosen() -> None:
    # A draft of 2 ms makes four tokens in a forward, so what more a forward may have is all one.
    assert chosen(make_times(step_ms=2.0)).optimistic.max_draft_tokens == 32


def test_but_not_where_its_last_row_is_hardly_ever_right() -> None:
    dear = make_times(step_ms=2.0, row_ms=1.0)
    assert chosen(dear, rate=0.9).optimistic.max_draft_tokens < 16


def test_nor_for_a_draft_that_is_not_known_yet() -> None:
    times = make_times(step_ms=2.0)
    times.acceptance = Acceptance(prior=0.5, prior_weight=100)
    assert chosen(times).optimistic.max_draft_tokens < 32
