"""What the adaptive policy measures, the draft lengths that follow from it, and how a draft learns
the weight of the noise in its choices."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hippo.speculation.estimates import (
    Acceptance,
    ForwardTimes,
    Lengths,
    PairTimes,
    RunningMean,
    best_lengths,
)
from hippo.speculation.sharpness import SHARPNESSES, Sharpness, SharpnessByTemperature
from hippo.types import Timing

MS = 1_000_000


def make_times(
    *, step_ms: float, row_ms: float = 0.25, restart_ms: float = 2.0, num_sequences: int = 1
) -> PairTimes:
    """A target that takes 7 ms and ``row_ms`` a row, and a draft."""
    times = PairTimes(num_sequences=num_sequences)
    times.draft_step = RunningMean(step_ms * MS)
    times.restart = RunningMean(restart_ms * MS)
    for rows in (1, 4, 8, 16, 33) * 10:
        shared = rows * num_sequences
        times.observe_forward(
            Timing(
                forward_ns=round((7 + row_ms * shared) * MS),
                num_sequences=num_sequences,
                num_batch_rows=shared,
            )
        )
    return times


def test_the_acceptance_rate_follows_the_outcomes() -> None:
    acceptance = Acceptance(0.85)
    assert acceptance.rate == 0.85
    acceptance.observe_outcomes([True] * 200)
    assert acceptance.rate > 0.97
    acceptance.observe_outcomes([False] * 200)
    assert acceptance.rate < 0.03


def test_one_stall_hardly_moves_a_mean() -> None:
    mean = RunningMean()
    mean.observe_time(10)
    mean.observe_time(1000)
    assert mean.value == pytest.approx(14)


def test_forward_times_are_a_line_over_the_rows() -> None:
    times = ForwardTimes()
    assert times.line() == (0, 0)
    for _ in range(30):
        for rows in (1, 6, 20):
            times.observe_forward(rows, (10 + 0.5 * rows) * MS)
    fixed, per_row = times.line()
    assert fixed == pytest.approx(10 * MS, rel=0.01)
    assert per_row == pytest.approx(0.5 * MS, rel=0.05)


def test_where_all_forwards_had_the_same_rows_a_typical_slope_is_assumed() -> None:
    times = ForwardTimes()
    for _ in range(10):
        times.observe_forward(1, 10 * MS)
    fixed, per_row = times.line()
    assert fixed + per_row == pytest.approx(10 * MS)
    assert per_row == pytest.approx(0.2 * MS)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 64), st.floats(1, 1e9)), min_size=1, max_size=60))
def test_no_line_is_negative(forwards: list[tuple[int, float]]) -> None:
    times = ForwardTimes()
    for rows, forward_ns in forwards:
        times.observe_forward(rows, forward_ns)
    fixed, per_row = times.line()
    assert per_row >= 0
    assert fixed + per_row >= -1e-3


def test_forwards_follow_a_changed_context_within_forty() -> None:
    times = make_times(step_ms=1.0)
    for _ in range(40):
        times.observe_forward(Timing(forward_ns=40 * MS, num_batch_rows=4))
    assert times.forwards_ns(3)[3] == pytest.approx(40 * MS, rel=0.15)


def test_the_load_is_the_mean_number_of_sequences_in_a_forward() -> None:
    times = PairTimes()
    for _ in range(200):
        times.observe_forward(Timing(forward_ns=10 * MS, num_sequences=6, num_batch_rows=30))
    assert times.num_sequences == pytest.approx(6, rel=0.01)


@pytest.mark.parametrize("num_sequences", [1, 4])
def test_better_drafts_are_verified_further(num_sequences: int) -> None:
    times = make_times(step_ms=1.0, num_sequences=num_sequences)
    lengths = [best_lengths(times, rate, 31) for rate in (0.3, 0.6, 0.85, 0.95)]
    assert [length.most for length in lengths] == sorted(length.most for length in lengths)
    assert [length.speedup for length in lengths] == sorted(length.speedup for length in lengths)
    assert lengths[-1].most > 2 * lengths[0].most


def test_load_makes_forwards_shorter() -> None:
    alone, loaded = (
        best_lengths(make_times(step_ms=1.0, num_sequences=count), 0.9, 31) for count in (1, 16)
    )
    assert loaded.most < alone.most


def test_the_idle_target_waits_for_a_fair_draft_and_not_for_a_bad_one() -> None:
    times = make_times(step_ms=0.3, restart_ms=0.5)
    assert best_lengths(times, 0.9, 31).first > 1
    assert best_lengths(times, 0.1, 31).first == 0


@pytest.mark.parametrize(("step_ms", "block"), [(0.5, 7), (1.0, 3), (2.0, 1), (9.0, 1)])
def test_two_blocks_are_drafted_in_a_step_of_one_row(step_ms: float, block: int) -> None:
    assert best_lengths(make_times(step_ms=step_ms), 0.95, 31).block == block


def test_a_draft_as_slow_as_the_target_is_worth_nothing() -> None:
    assert best_lengths(make_times(step_ms=12.0), 0.9, 31).speedup < 1.0


@settings(deadline=None)
@given(st.floats(0, 1), st.floats(0.01, 100), st.floats(0, 5), st.floats(0, 50), st.integers(1, 64))
def test_lengths_are_in_range_whatever_was_measured(
    rate: float, step_ms: float, row_ms: float, restart_ms: float, most: int
) -> None:
    times = make_times(step_ms=step_ms, row_ms=row_ms, restart_ms=restart_ms)
    lengths: Lengths = best_lengths(times, rate, most)
    assert 1 <= lengths.most <= most
    assert 0 <= lengths.first <= lengths.most
    assert 1 <= lengths.block <= most
    assert lengths.speedup > 0


@settings(deadline=None)
@given(st.floats(0, 0.99), st.floats(0.1, 20), st.floats(0, 2), st.floats(0, 9), st.integers(1, 32))
def test_on_a_shared_device_a_block_is_drafted_and_then_verified(
    rate: float, step_ms: float, row_ms: float, restart_ms: float, most: int
) -> None:
    times = make_times(step_ms=step_ms, row_ms=row_ms, restart_ms=restart_ms)
    times.takes_turns = True
    lengths = best_lengths(times, rate, most)
    num = lengths.block
    assert (lengths.most, lengths.first, lengths.reused) == (num, num, 0)

    def speed(count: int) -> float:
        tokens = sum(rate**right for right in range(count + 1))
        restart = times.restart.value or times.draft_step.value
        drafted = restart + (count - 1) * times.draft_step.value
        return tokens / (drafted + times.forwards_ns(most)[count])

    assert speed(num) == pytest.approx(max(speed(count) for count in range(1, most + 1)))
    assert lengths.speedup == pytest.approx(speed(num) * times.one_row_ns)


def test_the_sharpness_that_was_right_most_often_of_late_is_the_best() -> None:
    sharpness = Sharpness()
    assert SHARPNESSES[sharpness.place] == 1.0
    for _ in range(3):
        sharpness.observe_choices((5, 6, 9), 6)
    assert sharpness.place == 1
    sharpness.observe_choices((8, 8, 8), 8)
    assert sharpness.place == 1
    for _ in range(2000):
        sharpness.observe_choices((1, 2, 3), 3)
    assert sharpness.place == 2


def test_sequences_of_one_temperature_learn_together_and_greedy_ones_do_not() -> None:
    known = SharpnessByTemperature()
    assert known.at(0.8) is known.at(0.81) is not known.at(1.0)
    assert known.at(0.0) is None
