"""The three cores together, over toy models and whatever a network and a draft may do."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hippo.lab.simulation.devices import Costs, Outage, Outcome
from hippo.lab.simulation.key_cache import KeyCache
from hippo.lab.simulation.simulator import SecondChoice, Simulation, TokenFunction
from hippo.speculation.coordinator import Action
from hippo.speculation.core import Core
from hippo.speculation.policies import POLICY_NAMES, Policy, make_policy
from hippo.types import Block, Pace, StepLimits, Verdict

_MS = 1_000_000


def _hash(*values: object) -> int:
    return int.from_bytes(blake2b(repr(values).encode(), digest_size=4).digest())


def toy_target(seed: int, num_ids: int) -> TokenFunction:
    """The next id is a function of the last three and of the index."""
    return lambda history: _hash(seed, len(history), *history[-3:]) % num_ids


def toy_draft(target: TokenFunction, seed: int, agreement: float, num_ids: int) -> TokenFunction:
    """Agrees with the target in a share of all histories, the rest is up to another hash."""

    def draft(history: Sequence[int]) -> int:
        if _hash(seed, "agree", len(history), *history[-2:]) / 2**32 < agreement:
            return target(history)
        return _hash(seed, "other", len(history), *history[-3:]) % num_ids

    return draft


def toy_second_choice(target: TokenFunction, seed: int, num_ids: int) -> SecondChoice:
    """Is the target's token in half of all histories, and has any share up to a half."""

    def second_choice(history: Sequence[int]) -> tuple[int, float]:
        share = _hash(seed, "share", len(history), *history[-2:]) / 2**33
        if _hash(seed, "second", len(history), *history[-2:]) % 2:
            return target(history), share
        return _hash(seed, "third", len(history), *history[-2:]) % num_ids, share

    return second_choice


def decode_alone(target: TokenFunction, max_tokens: int, end_token_ids: set[int]) -> list[int]:
    ids: list[int] = []
    while len(ids) < max_tokens and not (ids and ids[-1] in end_token_ids):
        ids.append(target(ids))
    return ids


class RestlessPolicy:
    """Any pace at any time."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._pace = self._any_pace()

    @property
    def pace(self) -> Pace:
        return self._pace

    def observe_verdict(self, verdict: Verdict, outcomes: Sequence[bool], now_ns: int) -> None:
        if self._random.random() < 0.3:
            self._pace = self._any_pace()

    def observe_block(self, block: Block, outcomes: Sequence[bool], now_ns: int) -> None:
        if self._random.random() < 0.1:
            self._pace = self._any_pace()

    def observe_broken_run(self, outcomes: Sequence[bool], *, is_start: bool) -> None:
        pass

    def _any_pace(self) -> Pace:
        return Pace(
            optimistic=self._any_limits(),
            conservative=self._any_limits(),
            max_ahead=self._random.choice((0, 1, 2, 5, 16)),
            block_size=self._random.choice((0, 1, 2, 4)),
            max_reused=self._random.choice((0, 1, 5)),
            max_branched=self._random.choice((0, 2, 16)),
        )

    def _any_limits(self) -> StepLimits:
        return StepLimits(
            self._random.choice((0, 1, 4)),
            self._random.choice((0, 1, 3, 8)),
            self._random.choice((0, 1, 20)) * _MS,
        )


def run(
    *,
    policy: Policy,
    agreement: float,
    seed: int,
    max_tokens: int,
    end_token_ids: set[int],
    num_ids: int,
    leg_ns: Callable[[], float],
    draft_ns: Callable[[int, int], float],
    outages: Sequence[Outage] = (),
    repeat: Callable[[Action], bool] = lambda action: False,
    draft_prefill_ns: int = 30 * _MS,
) -> Outcome:
    """Runs one sequence and checks all that must hold of any."""
    target = toy_target(seed, num_ids)
    outcome = CheckedSimulation(
        target=target,
        draft=toy_draft(target, seed, agreement, num_ids),
        policy=policy,
        costs=Costs(
            target_ns=lambda num_rows, context: _MS * (9 + num_rows),
            draft_ns=draft_ns,
            leg_ns=leg_ns,
            draft_prefill_ns=draft_prefill_ns,
            draft_message_ns=100_000,
        ),
        max_tokens=max_tokens,
        end_token_ids=end_token_ids,
        outages=outages,
        repeat=repeat,
        max_guessed=seed % 5,
        second_choice=toy_second_choice(target, seed, num_ids),
    ).run(most_events=400 * max_tokens + 4_000)
    assert outcome.output_ids == decode_alone(target, max_tokens, end_token_ids)
    assert outcome.num_out_of_step == 0
    assert outcome.num_misread_steps == 0
    check_verdicts(outcome, max_tokens)
    check_stats(outcome)
    return outcome


class CheckedSimulation(Simulation):
    """Checks after every event that the KV caches hold what the cores say that they hold."""

    def call_at(self, time_ns: float, event: Callable[[], None]) -> None:
        def watched() -> None:
            event()
            self._check()

        super().call_at(time_ns, watched)

    def _check(self) -> None:
        cores: list[tuple[Core | None, KeyCache]] = [
            (self._verifier, self._target_keys),
            (self._drafter, self._draft_keys),
        ]
        for core, keys in cores:
            if core is not None:
                fed = list(core.fed_ids)
                assert list(keys.ids)[: len(fed)] == fed


class WatchedSimulation(CheckedSimulation):
    """Checks after every event that the gateway knows when the draft is silent in good order."""

    _num_in_flight = 0  # messages to the draft and from it

    def _send_message(self, leg: str, deliver: Callable[[], None]) -> None:
        def arrive() -> None:
            self._num_in_flight -= 1
            deliver()

        is_drafts = "draft" in leg
        self._num_in_flight += is_drafts
        super()._send_message(leg, arrive if is_drafts else deliver)

    def _check(self) -> None:
        super()._check()
        owes, drafter = self._coordinator.owes_block, self._drafter
        if drafter is None or not self._has_drafted:
            assert not owes
        elif not self._coordinator.committed_ids:
            assert not owes
        elif not self._coordinator.is_finished and not self._num_in_flight:
            has_more = not drafter.is_exhausted or drafter._num_sent < len(drafter.ids)
            assert not owes or (self._draft.is_busy and has_more)
            # Of a run that the drafter knows to be broken the next verdict tells the gateway.
            if drafter.epoch == self._coordinator.epoch:
                assert owes or drafter.is_exhausted


def check_verdicts(outcome: Outcome, max_tokens: int) -> None:
    ids: list[int] = []
    epoch = 0
    for verdict in outcome.verdicts:
        assert verdict.start_index == len(ids)
        assert verdict.token_ids
        assert verdict.num_accepted_tokens <= verdict.num_draft_tokens
        assert verdict.num_accepted_reused <= verdict.num_reused_tokens
        num_accepted = verdict.num_accepted_tokens + verdict.num_accepted_reused
        assert len(verdict.token_ids) - num_accepted in (0, 1)
        assert verdict.epoch >= epoch + verdict.is_rejection
        assert verdict.num_dropped_tokens >= verdict.is_rejection
        epoch = verdict.epoch
        ids.extend(verdict.token_ids)
    assert ids == outcome.output_ids
    assert all(verdict.finish_reason is None for verdict in outcome.verdicts[:-1])
    assert outcome.verdicts[-1].finish_reason is not None


def check_stats(outcome: Outcome) -> None:
    stats = outcome.stats
    assert stats.num_output_tokens == len(outcome.output_ids)
    assert stats.num_forwards == len(outcome.verdicts) - 1
    assert stats.num_accepted_tokens <= stats.num_draft_tokens
    assert stats.num_accepted_tokens <= stats.num_output_tokens
    assert stats.num_accepted_tokens == sum(stats.accepted_per_position)
    assert stats.num_draft_tokens == sum(stats.verified_per_position)
    assert sum(stats.all_run_lengths) <= stats.num_output_tokens  # none while the draft rests
    num_used = stats.num_accepted_tokens + stats.num_accepted_reused
    assert num_used <= stats.num_drafted_tokens
    assert stats.num_branches_taken <= stats.num_rejections
    num_told_apart = (
        stats.num_rejected_tokens + stats.num_behind_rejection_tokens + stats.num_stale_tokens
    )
    assert num_told_apart <= stats.num_dropped_tokens
    assert stats.num_rejected_tokens <= stats.num_rejections
    assert 0 <= stats.acceptance_rate <= 1
    assert stats.num_rejections >= len(stats.run_lengths)


agreements = st.sampled_from((0.0, 0.3, 0.7, 0.9, 0.97, 1.0))
policies = st.sampled_from(POLICY_NAMES)


@settings(deadline=None, max_examples=150)
@given(data=st.data(), name=policies, agreement=agreements, seed=st.integers(0, 2**16))
def test_output_equals_target_only_whatever_the_network_does(
    data: st.DataObject, name: str, agreement: float, seed: int
) -> None:
    rng = random.Random(seed)
    slowest_leg = data.draw(st.sampled_from((0.0, 0.3, 5.0, 60.0)))
    gamma = data.draw(st.integers(1, 7))
    outcome = run(
        policy=make_policy(name, gamma=gamma, max_draft_tokens=data.draw(st.integers(1, 16))),
        agreement=agreement,
        seed=seed,
        max_tokens=data.draw(st.integers(1, 60)),
        end_token_ids=data.draw(st.sampled_from((set(), {0}, {0, 1}))),
        num_ids=data.draw(st.sampled_from((2, 5, 40))),
        leg_ns=lambda: rng.random() * slowest_leg * _MS,
        draft_ns=lambda num_rows, context: (0.2 + rng.random() * 2) * _MS,
        draft_prefill_ns=data.draw(st.sampled_from((1, 30, 200))) * _MS,
    )
    if name in ("serial", "vpsd"):
        assert max(verdict.num_draft_tokens for verdict in outcome.verdicts) <= gamma


@settings(deadline=None, max_examples=150)
@given(data=st.data(), agreement=agreements, seed=st.integers(0, 2**16))
def test_output_equals_target_only_with_a_draft_that_stalls_dies_and_returns(
    data: st.DataObject, agreement: float, seed: int
) -> None:
    rng = random.Random(seed)
    lost_ms = data.draw(st.integers(1, 500))
    back_ms = data.draw(st.integers(1, 300))
    outages = [Outage(lost_ms * _MS, (lost_ms + back_ms) * _MS)]
    if data.draw(st.booleans()):
        outages.append(Outage((lost_ms + back_ms + 50) * _MS))
    name = data.draw(st.sampled_from((*POLICY_NAMES, "restless")))
    policy: Policy = RestlessPolicy(seed)
    if name != "restless":
        policy = make_policy(name, gamma=data.draw(st.integers(1, 7)), max_draft_tokens=16)
    slowest_leg = data.draw(st.sampled_from((0.3, 5.0, 60.0)))
    run(
        policy=policy,
        agreement=agreement,
        seed=seed,
        max_tokens=data.draw(st.integers(1, 80)),
        end_token_ids=data.draw(st.sampled_from((set(), {0}))),
        num_ids=data.draw(st.sampled_from((2, 40))),
        leg_ns=lambda: rng.random() * slowest_leg * _MS,
        draft_ns=lambda num_rows, context: 300 * _MS if rng.random() < 0.02 else 1.2 * _MS,
        outages=outages,
        repeat=lambda action: rng.random() < 0.2,
    )


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 2**20), agreement=agreements, draft_ms=st.sampled_from((0.5, 30, 2000)))
def test_output_equals_target_only_at_a_pace_that_keeps_changing(
    seed: int, agreement: float, draft_ms: float
) -> None:
    rng = random.Random(seed)
    run(
        policy=RestlessPolicy(seed),
        agreement=agreement,
        seed=seed,
        max_tokens=60,
        end_token_ids={0},
        num_ids=50,
        leg_ns=lambda: rng.expovariate(1) * _MS,
        draft_ns=lambda num_rows, context: draft_ms * _MS,
        repeat=lambda action: rng.random() < 0.2,
    )


@settings(deadline=None, max_examples=150)
@given(data=st.data(), agreement=agreements, seed=st.integers(0, 2**16))
def test_a_draft_owes_a_block_exactly_while_it_has_something_to_draft(
    data: st.DataObject, agreement: float, seed: int
) -> None:
    rng = random.Random(seed)
    name = data.draw(st.sampled_from((*POLICY_NAMES, "restless")))
    policy: Policy = RestlessPolicy(seed)
    if name != "restless":
        policy = make_policy(name, gamma=data.draw(st.integers(1, 7)), max_draft_tokens=16)
    target = toy_target(seed, num_ids := data.draw(st.sampled_from((2, 5, 40))))
    lost_ms = data.draw(st.integers(1, 500))
    outages = [Outage(lost_ms * _MS, (lost_ms + 50) * _MS)] if data.draw(st.booleans()) else []
    slowest_leg = data.draw(st.sampled_from((0.0, 0.3, 5.0)))
    simulation = WatchedSimulation(
        target=target,
        draft=toy_draft(target, seed, agreement, num_ids),
        policy=policy,
        costs=Costs(
            target_ns=lambda num_rows, context: _MS * (9 + num_rows),
            draft_ns=lambda num_rows, context: (0.2 + rng.random() * 2) * _MS,
            leg_ns=lambda: rng.random() * slowest_leg * _MS,
            draft_prefill_ns=data.draw(st.sampled_from((1, 30, 200))) * _MS,
        ),
        max_tokens=(max_tokens := data.draw(st.integers(20, 60))),
        end_token_ids=(ends := data.draw(st.sampled_from((set(), {0})))),
        outages=outages,
        max_guessed=seed % 5,
        second_choice=toy_second_choice(target, seed, num_ids),
    )
    outcome = simulation.run()
    assert outcome.output_ids == decode_alone(target, max_tokens, ends)
    assert outcome.num_misread_steps == 0


PATIENT = ("serial", "vpsd", "optimistic", "conservative")  # policies that wait for long


@pytest.mark.parametrize("name", PATIENT)
@pytest.mark.parametrize("agreement", [0.6, 1.0])
def test_a_draft_that_hangs_owes_a_block_whatever_it_has_said(name: str, agreement: float) -> None:
    for num_steps in range(1, 20):
        steps = itertools.count(1)
        hung_at: list[float] = []

        def draft_ns(_rows: int, _context: int) -> float:
            if next(steps) <= num_steps:  # noqa: B023
                return 1.2 * _MS
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
        late = [owes for now, owes in debts if now > hung_at[0] + 10 * _MS]
        assert late and all(late), num_steps


@pytest.mark.parametrize("name", PATIENT)
def test_a_draft_whose_prefill_does_not_end_costs_nothing(name: str) -> None:
    outcome = _with_draft(name, draft_prefill_ns=_FOREVER).run()
    assert outcome.decode_ns == 39 * 10 * _MS
    assert len(outcome.output_ids) == 40


@pytest.mark.parametrize("name", PATIENT)
def test_nor_does_one_that_joins_in_mid_answer_and_never_drafts(name: str) -> None:
    lost = Outage(100 * _MS, 150 * _MS)
    outcome = _with_draft(name, draft_prefill_ns=_FOREVER, outages=(lost,)).run()
    assert outcome.decode_ns == 39 * 10 * _MS


_FOREVER = 10**15


def _with_draft(
    name: str,
    *,
    draft_ns: Callable[[int, int], float] = lambda num_rows, context: 1.2 * _MS,
    draft_prefill_ns: int = _MS,
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
            target_ns=lambda num_rows, context: 10 * _MS,
            draft_ns=draft_ns,
            draft_prefill_ns=draft_prefill_ns,
        ),
        max_tokens=40,
        outages=outages,
    )


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_a_draft_that_is_always_right_is_never_rejected(name: str) -> None:
    outcome = run(
        policy=make_policy(name, gamma=4, max_draft_tokens=8),
        agreement=1.0,
        seed=1,
        max_tokens=100,
        end_token_ids=set(),
        num_ids=1000,
        leg_ns=lambda: 250_000.0,
        draft_ns=lambda num_rows, context: 1.2 * _MS,
    )
    assert outcome.stats.num_rejections == 0
    assert outcome.stats.num_accepted_tokens == outcome.stats.num_draft_tokens
    assert outcome.stats.num_stale_blocks == 0
    if name != "off":
        assert outcome.stats.mean_tokens_per_forward > 1.5


@pytest.mark.parametrize("name", ["serial", "vpsd", "optimistic", "conservative"])
def test_both_sides_count_the_same_epochs_when_nothing_is_lost(name: str) -> None:
    """A drafter that fell out of step would have its blocks dropped and little accepted."""
    outcome = run(
        policy=make_policy(name, gamma=3, max_draft_tokens=8),
        agreement=0.7,
        seed=3,
        max_tokens=300,
        end_token_ids=set(),
        num_ids=1000,
        leg_ns=lambda: 250_000.0,
        draft_ns=lambda num_rows, context: 1.2 * _MS,
    )
    assert outcome.stats.num_rejections > 20
    assert outcome.stats.mean_tokens_per_forward > 1.4
