"""Which pace each policy sets, and what the adaptive one learns."""

import random

import pytest

from hippo.lab.simulation.machine import ForwardTime, Machine
from hippo.lab.simulation.replay import PolicyChoice, replay
from hippo.lab.simulation.traces import Trace, agreement_trace
from hippo.speculation.adaptive import AdaptivePolicy
from hippo.speculation.estimates import PairTimes
from hippo.speculation.policies import POLICY_NAMES, Policy, make_policy
from hippo.types import Block, Pace, StepLimits, Timing, Verdict
from tests.support.devices.virtual import VirtualMachine, mean_speedup, simulate

MS = 1_000_000


def test_a_draft_length_may_follow_the_measured_times() -> None:
    for name in ("serial", "vpsd"):
        times = PairTimes()
        policy = make_policy(name, gamma="auto", max_draft_tokens=16, times=times)
        assert policy.pace == make_policy(name, gamma=5, max_draft_tokens=16).pace
        observe(policy, target_ms=24, draft_ms=3)
        assert policy.pace == make_policy(name, gamma=8, max_draft_tokens=16).pace
        following = make_policy(name, gamma="auto", max_draft_tokens=6, times=times)
        assert following.pace == make_policy(name, gamma=6, max_draft_tokens=16).pace
        slow = make_policy(name, gamma="auto", max_draft_tokens=6)
        observe(slow, target_ms=2, draft_ms=10)
        assert slow.pace == make_policy(name, gamma=1, max_draft_tokens=16).pace


def test_a_ratio_between_two_lengths_does_not_change_the_pace_with_each_measurement() -> None:
    policy = make_policy("vpsd", gamma="auto", max_draft_tokens=16)
    paces = set()
    for number in range(40):
        observe(policy, target_ms=16.9 if number % 2 else 16.1, draft_ms=3)
        paces.add(policy.pace)
    assert len(paces) == 1


def test_on_one_gpu_the_drafts_load_is_no_measurement_of_the_target() -> None:
    times = PairTimes(takes_turns=True)
    policy = make_policy("vpsd", gamma="auto", max_draft_tokens=16, times=times)
    observe(policy, target_ms=24, draft_ms=3)
    assert policy.pace == make_policy("vpsd", gamma=8, max_draft_tokens=16).pace
    assert not times.is_known


def observe(policy: Policy, *, target_ms: float, draft_ms: float) -> None:
    policy.observe_block(Block(0, 1, (1,), step_ns=round(draft_ms * MS)), (), 0)
    timing = Timing(forward_ns=round(target_ms * MS), num_rows=1)
    policy.observe_verdict(Verdict(0, 1, (1,), timing=timing), (), 0)


# Until its next rejection, a run settles one token and then gamma in the time of each forward.
@pytest.mark.parametrize("gamma", [2, 3, 4, 5, 6, 8, 9, 10, 12, 31])
def test_vpsd_has_the_schedule_of_pearl(gamma: int) -> None:
    free = Machine(name="free", target=ForwardTime(one_row_ms=gamma + 0.01),
                   draft=ForwardTime(one_row_ms=1.0))  # fmt: skip
    agrees = [True] * (1 + 12 * gamma)
    agrees[2 * gamma] = agrees[2 * gamma + 1] = False
    outcome = replay(PolicyChoice("vpsd", gamma), Trace(tuple(agrees)), free)
    rejected = next(k for k, verdict in enumerate(outcome.verdicts) if verdict.is_rejection)
    alone, caught, *going = outcome.verdicts[rejected + 1 :]
    assert alone.is_rejection and not alone.num_draft_tokens  # the draft's first token is wrong
    assert not caught.is_rejection and not caught.num_draft_tokens
    for verdict in (alone, caught):
        assert (len(verdict.token_ids), verdict.timing.wait_ns) == (1, 0)
    for verdict in going[:-1]:
        assert verdict.num_draft_tokens == gamma - 1
        assert len(verdict.token_ids) == gamma
        assert verdict.timing.wait_ns <= 1.01 * MS  # the steps of both begin a little apart
    assert outcome.stats.num_rejections == 2


@pytest.mark.parametrize("name", POLICY_NAMES)
@pytest.mark.parametrize("max_draft_tokens", [1, 2, 3, 7])
def test_no_policy_exceeds_the_operators_limit(name: str, max_draft_tokens: int) -> None:
    policy = make_policy(name, gamma=5, max_draft_tokens=max_draft_tokens)
    trace = agreement_trace(random.Random(1), 100, 0.9, 0.5)
    outcome = simulate(policy, trace, VirtualMachine(), seed=1)
    most = max(verdict.num_draft_tokens for verdict in outcome.verdicts)
    if name in ("off", "conservative"):
        assert most == (name == "conservative")
    else:
        assert 0 < most <= max_draft_tokens


def test_adaptive_stops_a_useless_draft_tries_it_again_and_never_waits_for_it() -> None:
    outcome = simulate(AdaptivePolicy(16), [False] * 200, VirtualMachine(), seed=0)
    assert outcome.stats.num_drafted_tokens < 200
    resting = [verdict.num_draft_tokens == 0 for verdict in outcome.verdicts]
    assert sum(resting) > 185
    assert outcome.stats.target_wait_ns == 0


def test_adaptive_does_not_rest_after_a_few_poor_forwards() -> None:
    times, machine = PairTimes(), VirtualMachine()
    good = agreement_trace(random.Random(2), 200, 0.85, 0.0)
    simulate(AdaptivePolicy(16, times), good, machine, seed=0)
    poor_at_first = [True, False, False, True, False, False, *good]
    outcome = simulate(AdaptivePolicy(16, times), poor_at_first, machine, seed=0)
    assert outcome.stats.num_one_row_forwards < 5


@pytest.mark.parametrize("step_ratio", [5.0, 8.3])
def test_adaptive_beats_serial_in_virtual_time(step_ratio: float) -> None:
    machine = VirtualMachine(step_ratio=step_ratio)
    traces = [agreement_trace(random.Random(seed), 128, 0.95, 0.5) for seed in range(4)]

    def speedup(name: str, gamma: int = 1) -> float:
        return mean_speedup(
            lambda: make_policy(name, gamma=gamma, max_draft_tokens=16), traces, machine
        )

    assert speedup("adaptive") > 1.09 * max(speedup("serial", gamma) for gamma in (4, 7, 10))


def test_adaptive_begins_with_a_trial_and_drafts_once_the_times_are_known() -> None:
    policy = make_policy("adaptive", gamma=5, max_draft_tokens=16)
    assert policy.pace.max_ahead == 2
    policy.observe_block(Block(0, 0, (1, 2), step_ns=1 * MS), (), 0)
    policy.observe_verdict(Verdict(0, 0, (1,), timing=Timing(forward_ns=50 * MS)), [True], 0)
    assert policy.pace.optimistic.max_draft_tokens == 0  # what one row takes is not known yet
    policy.observe_verdict(Verdict(0, 1, (2,), timing=Timing(forward_ns=10 * MS)), [True], 0)
    assert policy.pace.optimistic.max_draft_tokens > 2
    assert policy.pace.optimistic.wait_ns == 10 * MS  # no longer than a step alone takes


@pytest.mark.parametrize(("rate", "least", "most"), [(0.5, 1, 4), (0.85, 5, 8), (0.99, 12, 16)])
def test_on_one_gpu_draft_and_target_take_turns(rate: float, least: int, most: int) -> None:
    times = PairTimes(takes_turns=True)
    times.draft_step.observe_time(2 * MS)
    times.restart.observe_time(3 * MS)
    times.forwards.observe_forward(1, 20 * MS)
    rng = random.Random(0)
    times.acceptance.observe_outcomes(rng.random() < rate for _ in range(1000))
    policy = make_policy("adaptive", gamma=5, max_draft_tokens=16, times=times)
    num = policy.pace.block_size
    assert least <= num <= most
    limits = StepLimits(num, num, 2 * (3 + (num - 1) * 2) * MS)
    pace = Pace(optimistic=limits, conservative=limits, max_ahead=num, block_size=num)
    assert policy.pace == pace
    block = Block(0, 0, (1,) * num, step_ns=round(2.1 * MS))
    policy.observe_block(block, [True], 0)
    assert policy.pace == pace, "each change costs a message"


def test_a_trial_on_one_gpu_does_not_tell_how_fast_the_target_is() -> None:
    times = PairTimes(takes_turns=True)
    policy = make_policy("adaptive", gamma=5, max_draft_tokens=16, times=times)
    for index, forward_ms in enumerate((20, 35, 35), 1):
        timing = Timing(forward_ns=forward_ms * MS, num_rows=1)
        policy.observe_verdict(Verdict(0, index, (1,), timing=timing), (), 0)
    assert times.one_row_ns == pytest.approx(20 * MS)
