"""What the adaptive policy learns of the load, and how it changes the pace."""

from __future__ import annotations

import pytest

from hippo.speculation.adaptive import AdaptivePolicy
from hippo.speculation.estimates import Acceptance, Latency, PairTimes, expected_rate
from hippo.speculation.row_costs import RowCosts
from hippo.types import TARGET_ONLY, Block, Timing, Verdict

MS = 1_000_000
PASS_MS, ROW_MS, SEQUENCE_MS, STEP_MS = 4.0, 0.25, 0.25, 0.1


def forward_ns(num_rows: int, num_sequences: int) -> int:
    """A forward of a small model on one core: one pass over the weights, then every row counts."""
    return round((PASS_MS + ROW_MS * num_rows + SEQUENCE_MS * (num_sequences - 1)) * MS)


def measured(num_sequences: int, *, row_ms: float = ROW_MS, step_ms: float = STEP_MS) -> PairTimes:
    """What forwards of that many sequences teach."""
    times = PairTimes(latency=Latency(draft_step_ns=step_ms * MS, first_token_ns=1.5 * MS))
    for _ in range(60):
        for rows in (1, 2, 4, 8, 12, 16, 24):
            batch_rows = rows * num_sequences
            duration_ns = (PASS_MS + row_ms * batch_rows + SEQUENCE_MS * (num_sequences - 1)) * MS
            times.observe_forward(
                rows,
                Timing(
                    forward_ns=round(duration_ns),
                    num_sequences=num_sequences,
                    num_batch_rows=batch_rows,
                ),
            )
    return times


def chosen_most(times: PairTimes, *, rate: float) -> int:
    """The block that the policy's own formula finds best at that acceptance."""
    acceptance = Acceptance(prior=rate)
    costs = times.cost_table(33)
    return max(
        range(2, 33),
        key=lambda most: expected_rate(
            2, most, costs=costs, acceptance=acceptance, latency=times.latency
        ),
    )


def test_a_forward_of_several_sequences_is_learnt_by_all_its_rows() -> None:
    costs = RowCosts()
    for _ in range(20):
        costs.observe(8, forward_ns(8, 8), num_sequences=8)
    assert costs.table(1, num_sequences=8.0)[1] == pytest.approx(forward_ns(8, 8), rel=0.01)
    assert costs.table(1)[1] < forward_ns(8, 8)


def test_the_load_follows_the_sequences_that_share_a_forward() -> None:
    times = measured(8)
    assert times.num_sequences == pytest.approx(8, abs=0.1)
    for _ in range(40):
        times.observe_forward(4, Timing(forward_ns=forward_ns(4, 1), num_sequences=1))
    assert times.num_sequences == pytest.approx(1, abs=0.1)


def test_a_service_that_says_nothing_of_its_batch_counts_as_alone() -> None:
    times = PairTimes()
    times.observe_forward(4, Timing(forward_ns=5 * MS))
    assert times.num_sequences == 1
    assert times.cost_table(4)[4] == times.cost(4) == 5 * MS


def test_costs_are_kept_apart_by_context_length() -> None:
    times = PairTimes()
    for _ in range(20):
        times.observe_forward(1, Timing(forward_ns=5 * MS, context_length=200))
        times.observe_forward(8, Timing(forward_ns=7 * MS, context_length=200))
    times.observe_forward(1, Timing(forward_ns=10 * MS, context_length=25_000))
    short, long = (times.cost_table(8, context_length=length) for length in (300, 30_000))
    assert short[1] == pytest.approx(5 * MS)
    assert long[1] == pytest.approx(10 * MS)
    assert long[8] == pytest.approx(14 * MS)  # in proportion, until it is measured
    for _ in range(20):
        times.observe_forward(8, Timing(forward_ns=11 * MS, context_length=25_000))
    assert times.cost_table(8, context_length=25_000)[8] == pytest.approx(11 * MS, rel=0.05)
    assert times.cost_table(8, context_length=200)[8] == pytest.approx(7 * MS)


def test_forwards_of_one_sequence_and_of_several_are_learnt_apart() -> None:
    """Steps of fixed rows may run for one sequence, and any rows for several."""
    times = PairTimes()
    for _ in range(20):
        times.observe_forward(20, Timing(forward_ns=10 * MS))
        shared = Timing(forward_ns=15 * MS, num_sequences=4, num_batch_rows=20)
        for _ in range(4):
            times.observe_forward(5, shared)
    times.num_sequences = 4.0
    assert times.cost(5) == pytest.approx(15 * MS)
    times.num_sequences = 1.0
    assert times.cost(20) == pytest.approx(10 * MS)


def test_what_is_known_of_one_sequence_is_where_several_begin() -> None:
    times = PairTimes()
    for rows, duration_ms in ((1, 4), (8, 6)):
        for _ in range(20):
            times.observe_forward(rows, Timing(forward_ns=duration_ms * MS))
    shared = Timing(forward_ns=6 * MS, num_sequences=4, num_batch_rows=4)
    times.observe_forward(1, shared)  # one and a half times what seven rows take alone
    times.num_sequences = 4.0
    assert times.cost(1) == pytest.approx(6 * MS, rel=0.05)
    assert times.cost(2) > 1.1 * times.cost(1)


def test_a_context_that_nobody_has_met_costs_what_the_nearest_does() -> None:
    times = PairTimes()
    assert not times.costs(100).is_known
    times.observe_forward(1, Timing(forward_ns=5 * MS, context_length=200))
    times.observe_forward(1, Timing(forward_ns=9 * MS, context_length=20_000))
    assert times.cost_table(1, context_length=20)[1] == 5 * MS
    assert times.cost_table(1, context_length=2_000_000)[1] == 9 * MS


def test_blocks_are_shorter_under_load_when_rows_are_dear() -> None:
    most = [chosen_most(measured(count), rate=0.9) for count in (1, 4, 16)]
    assert most[0] > most[1] > most[2]


def test_blocks_stay_long_under_load_when_rows_are_free() -> None:
    free = [chosen_most(measured(count, row_ms=0.001), rate=0.98) for count in (1, 8)]
    assert min(free) >= 16


def test_a_new_sequence_begins_with_what_others_have_measured() -> None:
    alone, loaded = (AdaptivePolicy(32, measured(count)) for count in (1, 16))
    assert loaded.pace.optimistic.max_draft_tokens < alone.pace.optimistic.max_draft_tokens
    assert loaded.pace.max_ahead < alone.pace.max_ahead


def test_of_blocks_that_are_worth_the_same_under_load_the_shorter_one_is_taken() -> None:
    times = measured(8, step_ms=0.7)
    for number in range(2000):
        times.acceptance.observe(is_right=number % 66 != 0, is_first=False)
    assert chosen_most(times, rate=times.acceptance.rate) > 16
    assert AdaptivePolicy(32, times).pace.optimistic.max_draft_tokens <= 16


def test_under_load_the_draft_says_more_at_once() -> None:
    alone, loaded = (AdaptivePolicy(32, measured(count, step_ms=0.7)) for count in (1, 6))
    assert loaded.pace.block_size > alone.pace.block_size


def drive(policy: AdaptivePolicy, *, num_sequences: int, row_ms: float, num_verdicts: int) -> None:
    """Whole blocks, nine of ten accepted whole, in forwards that others share."""
    index, epoch = 1, 0
    policy.observe_verdict(Verdict(0, 0, (5,)), 0)
    for number in range(num_verdicts):
        most = policy.pace.optimistic.max_draft_tokens
        if policy.pace.max_ahead:
            ids = (5,) * (most or policy.pace.block_size)
            policy.observe_block(Block(epoch, index, ids, step_ns=round(STEP_MS * MS)), 0)
        is_rejection = bool(most) and number % 10 == 9
        num_accepted = most - 1 if is_rejection else most
        epoch += is_rejection
        batch_rows = (most + 1) * num_sequences
        duration_ns = (PASS_MS + row_ms * batch_rows + SEQUENCE_MS * (num_sequences - 1)) * MS
        verdict = Verdict(
            epoch,
            index,
            (5,) * (num_accepted + 1),
            num_draft_tokens=most,
            num_accepted_tokens=num_accepted,
            is_rejection=is_rejection,
            timing=Timing(
                forward_ns=round(duration_ns),
                num_rows=most + 1,
                num_sequences=num_sequences,
                num_batch_rows=batch_rows,
            ),
        )
        index += num_accepted + 1
        policy.observe_verdict(verdict, 0)


def test_speculation_ends_when_every_row_costs_a_pass_and_comes_back_when_it_does_not() -> None:
    times = measured(8, row_ms=40.0)
    policy = AdaptivePolicy(16, times)
    drive(policy, num_sequences=8, row_ms=40.0, num_verdicts=12)
    assert policy.pace == TARGET_ONLY
    later = AdaptivePolicy(16, times)
    drive(later, num_sequences=1, row_ms=0.05, num_verdicts=60)
    assert later.pace.max_ahead > 0


def test_a_new_sequence_expects_of_the_draft_what_it_was_worth_to_others() -> None:
    rates = []
    for is_right in (True, False):
        times = measured(1)
        for _ in range(300):
            times.acceptance.observe(is_right=is_right, is_first=False)
        rates.append(AdaptivePolicy(16, times).acceptance_rate)
    assert rates[0] > 0.95
    assert rates[1] < 0.5
