"""Adaptive is never much slower than target-only, whatever the draft does; all in virtual time."""

from __future__ import annotations

import itertools

import pytest

from hippo.speculation.adaptive import AdaptivePolicy
from hippo.speculation.estimates import PairTimes
from tests.support.running.faults import parse_fault
from tests.support.running.faulty import Place, speedup

FAULTS = (
    "random",
    "slow:10",
    "slow:30",
    "slow-then-quick:10,300",
    "stall:5,ever",
    "stall:200,ever",
    "stall:100,100",
    "right-then-wrong:8,ever",
    "right-then-wrong:100,ever",
    "right-then-wrong:50,50",
    "right-then-wrong:5,5",
    "right-then-wrong:3,20",
)

# Of target-only decoding's speed. Each time that a draft wins trust for a few tokens and loses
# it, a dear forward was in vain.
LEAST = {"right-then-wrong:3,20": 0.935, "right-then-wrong:5,5": 0.945}


def ratio(place: Place, fault: str, *, seed: int, num_answers: int = 3) -> float:
    """Speedup over target-only of answers that follow each other, at a gateway that at first
    knows of its load alone."""
    times = PairTimes(num_sequences=place.num_sequences)
    policies = [AdaptivePolicy(32, times) for _ in range(num_answers)]
    return speedup(place, parse_fault(fault), make=policies, seed=seed)


# A dear row makes every vain one dearer: with cheap ones no fault costs more.
ALONE = [
    *itertools.product(("steep",), (3.0, 8.3, 15.0), (0.25, 3.0)),
    *(("measured", 3.0, 0.25), ("measured", 8.3, 3.0), ("measured", 15.0, 0.25)),
    ("flat", 3.0, 3.0),
]


@pytest.mark.parametrize("fault", FAULTS)
def test_alone_no_fault_costs_more_than_it_may(fault: str) -> None:
    for row_costs, step_ratio, leg_ms in ALONE:
        place = Place(step_ratio=step_ratio, leg_ms=leg_ms, row_costs=row_costs)
        assert ratio(place, fault, seed=1) >= LEAST.get(fault, 0.96), place


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("num_sequences", [4, 8])
def test_under_load_no_fault_costs_more_than_it_may(fault: str, num_sequences: int) -> None:
    for step_ratio in (3.0, 8.3):
        place = Place(step_ratio=step_ratio, num_sequences=num_sequences)
        assert ratio(place, fault, seed=1) >= LEAST.get(fault, 0.96), place


@pytest.mark.parametrize(
    ("fault", "least"),
    [("slow-then-quick:10,300", 1.3), ("stall:100,100", 1.3), ("right-then-wrong:50,50", 1.1)],
)
def test_a_draft_that_recovers_is_used_again(fault: str, least: float) -> None:
    place = Place(num_tokens=300)
    assert ratio(place, fault, seed=3) > least
