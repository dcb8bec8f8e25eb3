"""Which pace each policy sets, and what the adaptive one learns."""

from __future__ import annotations

import random

import pytest

from bench.simulate_policies import Machine, agreement_trace, mean_speedup, simulate
from hippo.errors import InvalidRequestError
from hippo.speculation.adaptive import AdaptivePolicy
from hippo.speculation.estimates import Acceptance, Latency, expected_rate
from hippo.speculation.policies import POLICY_NAMES, make_policy
from hippo.speculation.row_costs import RowCosts
from hippo.speculation.simulator import Outcome
from hippo.types import TARGET_ONLY, Block, Timing, Verdict

MS = 1_000_000


def run_adaptive(trace: list[bool], machine: Machine) -> tuple[AdaptivePolicy, Outcome]:
    policy = AdaptivePolicy(16)
    return policy, simulate(policy, trace, machine, seed=0)


def test_every_name_makes_a_policy() -> None:
    for name in POLICY_NAMES:
        make_policy(name, gamma=5, max_draft_tokens=16)


def test_an_unknown_name_is_answered_with_the_choices() -> None:
    with pytest.raises(InvalidRequestError, match="adaptive, serial, vpsd"):
        make_policy("magic", gamma=5, max_draft_tokens=16)


@pytest.mark.parametrize(("gamma", "max_draft_tokens"), [(0, 4), (4, 0), (-1, 4)])
def test_numbers_out_of_range_are_refused(gamma: int, max_draft_tokens: int) -> None:
    with pytest.raises(InvalidRequestError, match="at least 1"):
        make_policy("serial", gamma=gamma, max_draft_tokens=max_draft_tokens)


def test_off_is_target_only() -> None:
    assert make_policy("off", gamma=5, max_draft_tokens=16).pace == TARGET_ONLY


def test_serial_leaves_the_draft_idle_while_the_target_verifies() -> None:
    pace = make_policy("serial", gamma=5, max_draft_tokens=16).pace
    assert pace.optimistic == pace.conservative
    assert (pace.optimistic.min_draft_tokens, pace.optimistic.max_draft_tokens) == (5, 5)
    assert (pace.max_ahead, pace.block_size) == (5, 5)


def test_vpsd_takes_the_first_token_after_a_rejection() -> None:
    pace = make_policy("vpsd", gamma=5, max_draft_tokens=16).pace
    assert (pace.conservative.min_draft_tokens, pace.conservative.max_draft_tokens) == (1, 1)
    assert (pace.optimistic.min_draft_tokens, pace.max_ahead) == (5, 11)


@pytest.mark.parametrize("name", POLICY_NAMES)
@pytest.mark.parametrize("max_draft_tokens", [1, 2, 3, 7])
def test_no_policy_exceeds_the_operators_limit(name: str, max_draft_tokens: int) -> None:
    policy = make_policy(name, gamma=5, max_draft_tokens=max_draft_tokens)
    trace = agreement_trace(random.Random(1), 100, 0.9, 0.5)
    outcome = simulate(policy, trace, Machine(), seed=1)
    most = max(verdict.num_draft_tokens for verdict in outcome.verdicts)
    assert most == (0 if name == "off" else 1 if name == "conservative" else most)
    assert most <= max_draft_tokens


def test_row_costs_are_learnt_and_never_fall() -> None:
    costs = RowCosts()
    assert not costs.is_known
    for _ in range(20):
        costs.observe(1, 10 * MS)
        costs.observe(8, 14 * MS)
        costs.observe(12, 13 * MS)
    table = costs.table(17)
    assert table[1] == 10 * MS
    assert table[8] == pytest.approx(14 * MS)
    assert table == sorted(table)


def test_one_slow_forward_hardly_moves_a_cost() -> None:
    costs = RowCosts()
    costs.observe(1, 10 * MS)
    costs.observe(1, 1000 * MS)
    assert costs.table(1)[1] < 15 * MS


def test_a_slow_first_forward_of_many_rows_is_not_believed_for_ever() -> None:
    costs = RowCosts()
    costs.observe(1, 10 * MS)
    costs.observe(16, 200 * MS)
    slow = costs.table(16)[16]
    assert slow < 40 * MS  # as the first of its kind
    for _ in range(60):
        costs.observe(8, 15 * MS)
    assert costs.table(16)[16] < 0.8 * slow
    assert costs.table(1)[1] == 10 * MS


def test_the_first_token_after_a_rejection_is_counted_apart() -> None:
    acceptance = Acceptance()
    for _ in range(30):
        acceptance.observe(is_right=False, is_first=True)
        for _ in range(9):
            acceptance.observe(is_right=True, is_first=False)
    assert 0.8 < acceptance.rate < 0.95
    assert acceptance.first_rate < 0.4


def test_the_idle_target_waits_for_a_fair_draft_and_not_for_a_bad_one() -> None:
    costs = [0.0, *(10.0 + 0.5 * n for n in range(20))]

    def best(rate: float) -> int:
        acceptance = Acceptance(prior=rate)
        latency = Latency(draft_step_ns=0.5, first_token_ns=3.0)
        return max(
            range(9),
            key=lambda first: expected_rate(
                first, 16, costs=costs, acceptance=acceptance, latency=latency
            ),
        )

    assert best(0.7) > 1
    assert best(0.1) == 0


def test_adaptive_stops_a_useless_draft_and_tries_it_again() -> None:
    policy, outcome = run_adaptive([False] * 200, Machine())
    assert policy.acceptance_rate < 0.3
    assert outcome.stats.num_drafted_tokens < 200
    resting = [verdict.num_draft_tokens == 0 for verdict in outcome.verdicts]
    assert sum(resting) > 185


def test_adaptive_finds_back_when_the_draft_becomes_good() -> None:
    policy, outcome = run_adaptive([False] * 60 + [True] * 240, Machine())
    assert policy.pace.max_ahead > 0
    assert policy.acceptance_rate > 0.9
    assert outcome.stats.num_forwards < 60 + 100


def test_adaptive_keeps_a_good_draft_going() -> None:
    policy, outcome = run_adaptive(agreement_trace(random.Random(2), 200, 0.95, 0.5), Machine())
    assert outcome.stats.mean_tokens_per_forward > 3
    assert policy.pace.max_ahead > 8


@pytest.mark.parametrize("step_ratio", [5.0, 8.3])
def test_adaptive_beats_serial_in_virtual_time(step_ratio: float) -> None:
    machine = Machine(step_ratio=step_ratio)
    traces = [agreement_trace(random.Random(seed), 128, 0.95, 0.5) for seed in range(4)]

    def speedup(name: str, gamma: int = 1) -> float:
        return mean_speedup(
            lambda: make_policy(name, gamma=gamma, max_draft_tokens=16), traces, machine
        )

    assert speedup("adaptive") > 1.15 * max(speedup("serial", gamma) for gamma in (4, 7, 10))


def test_adaptive_costs_next_to_nothing_with_a_random_draft_in_virtual_time() -> None:
    traces = [[False] * 128] * 3
    speedup = mean_speedup(
        lambda: make_policy("adaptive", gamma=5, max_draft_tokens=16), traces, Machine()
    )
    assert speedup > 0.98


def test_adaptive_waits_for_no_draft_that_was_never_right_nor_after_a_wait_in_vain() -> None:
    policy = make_policy("adaptive", gamma=5, max_draft_tokens=16)
    assert policy.pace.optimistic.min_draft_tokens == 0
    policy.observe_block(Block(0, 0, (1, 2), step_ns=1_000_000), 0)
    assert policy.pace.conservative.min_draft_tokens == 0
    policy.observe_verdict(Verdict(0, 0, (1,), timing=Timing(forward_ns=50_000_000)), 0)
    assert policy.pace.optimistic.max_draft_tokens == 0  # what one row takes is not known yet
    policy.observe_verdict(Verdict(0, 1, (2,), timing=Timing(forward_ns=10_000_000)), 0)
    assert policy.pace.optimistic.max_draft_tokens > 0
    in_vain = Timing(forward_ns=10_000_000, wait_ns=5_000_000, num_rows=1)
    policy.observe_verdict(Verdict(0, 2, (3,), timing=in_vain), 0)
    assert policy.pace.conservative.min_draft_tokens == 0


def test_a_random_draft_is_never_waited_for() -> None:
    _, outcome = run_adaptive([False] * 128, Machine())
    assert outcome.stats.target_wait_ns == 0
    assert outcome.stats.num_draft_tokens == 0


@pytest.mark.parametrize("decay", [0.985, 0.998])
@pytest.mark.parametrize("is_first", [True, False])
def test_tokens_learnt_together_count_as_one_by_one(decay: float, *, is_first: bool) -> None:
    together, one_by_one = Acceptance(decay=decay), Acceptance(decay=decay)
    for count, is_right in ((5, True), (1, False), (3, True), (2, False)):
        together.observe(is_right=is_right, is_first=is_first, count=count)
        for number in range(count):
            one_by_one.observe(is_right=is_right, is_first=is_first and number == 0)
    assert together.rate == pytest.approx(one_by_one.rate)
    assert together.first_rate == pytest.approx(one_by_one.first_rate)
    assert (together.num_trials, together.num_right) == (11, 8)
