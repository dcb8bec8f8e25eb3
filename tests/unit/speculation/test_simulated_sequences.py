"""The three cores together, over toy models and whatever a network and a draft may do."""

import itertools
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hippo.lab.simulation.devices import Costs, Outage
from hippo.lab.simulation.simulator import Simulation
from hippo.speculation.policies import POLICY_NAMES, Policy, make_policy
from hippo.speculation.stats import SpeculationStats
from hippo.types import Verdict
from tests.unit.speculation.simulated import MS, RestlessPolicy, run, toy_draft, toy_target


@pytest.mark.parametrize("is_faulty", [False, True], ids=["in-good-order", "with-outages"])
@settings(deadline=None, max_examples=250)
@given(
    data=st.data(),
    name=st.sampled_from((*POLICY_NAMES, "restless")),
    agreement=st.sampled_from((0.0, 0.3, 0.7, 0.9, 0.97, 1.0)),
    seed=st.integers(0, 2**16),
)
def test_output_equals_target_only_whatever_network_draft_and_pace_do(
    is_faulty: bool, data: st.DataObject, name: str, agreement: float, seed: int
) -> None:
    """In bad order a draft stalls, dies and returns, and messages come twice."""
    rng = random.Random(seed)
    gamma = data.draw(st.integers(1, 7))
    policy: Policy = RestlessPolicy(seed)
    if name != "restless":
        policy = make_policy(name, gamma=gamma, max_draft_tokens=data.draw(st.integers(1, 16)))
    outages = []
    if is_faulty:
        lost_ms, back_ms = data.draw(st.integers(1, 500)), data.draw(st.integers(1, 300))
        outages.append(Outage(lost_ms * MS, (lost_ms + back_ms) * MS))
        if data.draw(st.booleans()):
            outages.append(Outage((lost_ms + back_ms + 50) * MS))
    slowest_leg = data.draw(st.sampled_from((0.0, 0.3, 5.0, 60.0)))
    draft_ms = data.draw(st.sampled_from((1.2, 1.2, 0.3, 30, 2000)))

    def draft_ns(num_rows: int, context: int) -> float:
        return (
            300 * MS if is_faulty and rng.random() < 0.02 else (0.2 + rng.random()) * draft_ms * MS
        )

    outcome = run(
        policy=policy,
        agreement=agreement,
        seed=seed,
        max_tokens=data.draw(st.integers(1, 80)),
        end_token_ids=data.draw(st.sampled_from((set(), {0}, {0, 1}))),
        num_ids=data.draw(st.sampled_from((2, 5, 50))),
        leg_ns=lambda: rng.random() * slowest_leg * MS,
        draft_ns=draft_ns,
        draft_prefill_ns=data.draw(st.sampled_from((1, 30, 200))) * MS,
        outages=outages,
        repeat=lambda action: is_faulty and rng.random() < 0.2,
    )
    if name in ("serial", "vpsd"):
        assert max(verdict.num_draft_tokens for verdict in outcome.verdicts) <= gamma


PATIENT = ("serial", "vpsd", "optimistic", "conservative")  # policies that wait for long


@pytest.mark.parametrize("name", PATIENT)
@pytest.mark.parametrize("agreement", [0.6, 1.0])
def test_a_draft_that_hangs_owes_a_block_whatever_it_has_said(name: str, agreement: float) -> None:
    for num_steps in range(1, 20):
        steps = itertools.count(1)
        hung_at: list[float] = []

        def draft_ns(_rows: int, _context: int) -> float:
            if next(steps) <= num_steps:  # noqa: B023
                return 1.2 * MS
            hung_at.append(simulation.now)  # noqa: B023
            return _FOREVER

        simulation = _with_draft(name, draft_ns=draft_ns, agreement=agreement)
        debts: list[tuple[float, bool]] = []
        relay = simulation._on_verdict

        def on_verdict(verdict: Verdict) -> None:
            relay(verdict)  # noqa: B023
            coordinator = simulation._coordinator  # noqa: B023
            if len(coordinator.committed_ids) < 39:  # the last one is the target's own
                debts.append((simulation.now, coordinator.owes_block))  # noqa: B023

        simulation._on_verdict = on_verdict  # type: ignore[method-assign]
        simulation.run()
        late = [owes for now, owes in debts if now > hung_at[0] + 10 * MS]
        assert late and all(late), num_steps


@pytest.mark.parametrize("name", PATIENT)
@pytest.mark.parametrize("outages", [(), (Outage(100 * MS, 150 * MS),)], ids=["first", "joining"])
def test_a_draft_whose_prefill_does_not_end_costs_nothing(
    name: str, outages: Sequence[Outage]
) -> None:
    outcome = _with_draft(name, draft_prefill_ns=_FOREVER, outages=outages).run()
    assert outcome.decode_ns == 39 * 10 * MS
    assert len(outcome.output_ids) == 40


_FOREVER = 10**15


def _with_draft(
    name: str,
    *,
    draft_ns: Callable[[int, int], float] = lambda num_rows, context: 1.2 * MS,
    draft_prefill_ns: int = MS,
    outages: Sequence[Outage] = (),
    agreement: float = 1.0,
) -> Simulation:
    """An answer of 40 tokens whose target takes ten milliseconds for any number of rows."""
    target = toy_target(1, 1000)
    return Simulation(
        target=target,
        draft=toy_draft(target, 1, agreement, 1000),
        policy=make_policy(name, gamma=4, max_draft_tokens=4),
        costs=Costs(
            target_ns=lambda num_rows, context: 10 * MS,
            draft_ns=draft_ns,
            draft_prefill_ns=draft_prefill_ns,
        ),
        max_tokens=40,
        outages=outages,
    )


def _smooth_stats(name: str, *, agreement: float, seed: int, max_tokens: int) -> SpeculationStats:
    """The counts of an answer during which nothing is lost or late."""
    return run(
        policy=make_policy(name, gamma=4, max_draft_tokens=8),
        agreement=agreement,
        seed=seed,
        max_tokens=max_tokens,
        end_token_ids=set(),
        num_ids=1000,
        leg_ns=lambda: 250_000.0,
        draft_ns=lambda num_rows, context: 1.2 * MS,
    ).stats


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_a_draft_that_is_always_right_is_never_rejected(name: str) -> None:
    stats = _smooth_stats(name, agreement=1.0, seed=1, max_tokens=100)
    assert stats.num_accepted_tokens == stats.num_draft_tokens
    assert stats.num_rejections == stats.num_stale_blocks == 0
    assert name == "off" or stats.mean_tokens_per_forward > 1.5


@pytest.mark.parametrize("name", PATIENT)
def test_both_sides_count_the_same_epochs_when_nothing_is_lost(name: str) -> None:
    """A drafter that fell out of step would have its blocks dropped and little accepted."""
    stats = _smooth_stats(name, agreement=0.7, seed=3, max_tokens=300)
    assert stats.num_rejections > 20
    assert stats.mean_tokens_per_forward > 1.4
