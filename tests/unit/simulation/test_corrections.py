"""Corrections prepared while the draft idles, in virtual time."""

from __future__ import annotations

import dataclasses
import random

import pytest

from hippo.simulation.corrections import Preparing, runner_of
from hippo.simulation.machine import Machine, StepTime
from hippo.simulation.replay import PolicyChoice, replay, replay_all
from hippo.simulation.traces import Trace, Words, drawn_traces

MACHINE = Machine(
    name="a draft with time to spare",
    target=StepTime(one_row_ms=10.0),
    draft=StepTime(one_row_ms=1.0),
    leg_ms=0.2,
)
POLICIES = [PolicyChoice("serial", 4), PolicyChoice("vpsd", 4), PolicyChoice("adaptive")]
TRACES = drawn_traces(agreement=0.8, num_traces=6, num_tokens=200)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_answers_stay_the_same_whatever_is_prepared(policy: PolicyChoice, share: float) -> None:
    for trace in TRACES:
        off = replay(policy, trace, MACHINE)
        for is_held_up in (False, True):
            preparing = Preparing(3, share, is_held_up=is_held_up)
            found = replay(policy, trace, MACHINE, preparing=preparing)
            assert found.output_ids == off.output_ids
            assert found.num_out_of_step == 0


@pytest.mark.parametrize("seed", range(4))
def test_answers_stay_the_same_with_delays_that_vary(seed: int) -> None:
    machine = dataclasses.replace(MACHINE, jitter=0.6, leg_ms=random.Random(seed).uniform(0, 4))
    for policy in POLICIES:
        trace = TRACES[seed]
        off = replay(policy, trace, machine, seed=seed)
        found = replay(policy, trace, machine, seed=seed, preparing=Preparing(4, 0.8))
        assert found.output_ids == off.output_ids


def test_a_serial_draft_whose_second_choice_is_right_has_nearly_all_corrections_ready() -> None:
    policy = PolicyChoice("serial", 4)
    off = replay_all(policy, TRACES, MACHINE)
    found = replay_all(policy, TRACES, MACHINE, Preparing(4, 1.0))
    assert found.num_ready > 0.9 * found.num_rejections
    # Each of them saves up to a block's four steps of a round of about fourteen.
    assert 1.05 < off.decode_ns / found.decode_ns < 1.4


def test_wrong_second_choices_gain_nothing_and_cost_nothing() -> None:
    policy = PolicyChoice("vpsd", 4)
    off = replay_all(policy, TRACES, MACHINE)
    found = replay_all(policy, TRACES, MACHINE, Preparing(4, 0.0))
    assert found.num_ready == 0
    assert found.decode_ns == pytest.approx(off.decode_ns)


def test_a_step_that_has_to_wait_for_a_preparation_comes_later() -> None:
    policy = PolicyChoice("serial", 4)
    slow = dataclasses.replace(MACHINE, draft=StepTime(one_row_ms=3.0, row_ms=1.0))
    off = replay_all(policy, TRACES, slow)
    found = replay_all(policy, TRACES, slow, Preparing(4, 0.0, is_held_up=True))
    assert found.decode_ns > 1.01 * off.decode_ns


def test_a_draft_without_idle_time_prepares_nothing_before_its_answers_end() -> None:
    busy = dataclasses.replace(MACHINE, draft=StepTime(one_row_ms=9.0))
    outcome = replay(PolicyChoice("optimistic"), TRACES[0], busy, preparing=Preparing(4, 1.0))
    assert (outcome.num_preparations, outcome.num_ready) == (1, 0)


def test_recorded_second_choices_are_those_of_their_place_and_run() -> None:
    words = Words(
        token_ids=(5, 6, 7),
        draft_ids=(5, 9, 7),
        branches={1: (8, 8)},
        text_ids=(),
        second_ids=(1, 6, 7),
        margins=(3.0, 0.5, 2.0),
        branch_margins={1: (0.25,)},
    )
    runner = runner_of(Trace((True, False, True), words=words), Preparing(1), end_id=-1)
    assert (runner([]).token_id, runner([]).margin) == (1, 3.0)
    assert (runner([5]).token_id, runner([5]).margin) == (6, 0.5)
    assert runner([5, 6]).token_id == -1  # the answer's last token
    assert runner([5, 9]).margin == 0.25  # behind the draft's own wrong token
    assert runner([5, 9, 8]).margin > 50 < runner([5, 3]).margin  # nobody asked
