"""Answers with drafts that misbehave, in virtual time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from hippo.lab.simulation.devices import Costs, Outcome
from hippo.lab.simulation.simulator import Simulation
from hippo.lab.simulation.traces import agreement_trace
from hippo.speculation.policies import Policy, make_policy
from tests.support.devices.virtual import row_cost
from tests.support.running.faults import DraftFault

_MS = 1_000_000
_WRONG = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A machine, a load, and a draft that agrees so often while nothing is wrong with it."""

    step_ratio: float = 8.3
    row_costs: str = "measured"
    leg_ms: float = 0.25
    num_sequences: int = 1
    target_ms: float = 10.0
    agreement: float = 0.95
    num_tokens: int = 120


def answer(policy: Policy, place: Place, fault: DraftFault, seed: int) -> Outcome:
    """One answer; the fault's clock begins with its first draft step."""
    rng = random.Random(seed)
    agrees = agreement_trace(random.Random(f"{seed}"), place.num_tokens, place.agreement, 0.5)
    began_ms: list[float] = []

    def target(history: Sequence[int]) -> int:
        return len(history) * 7 % 1000

    def draft(history: Sequence[int]) -> int:
        index = len(history)
        is_right = index < len(agrees) and agrees[index] and not fault.is_wrong_at(index)
        return target(history) + (0 if is_right else _WRONG)

    def target_ns(num_rows: int, _: int) -> float:
        return (
            place.target_ms
            * _MS
            * row_cost(place.row_costs, num_rows)
            * rng.lognormvariate(0, 0.05)
        )

    def draft_ns(num_rows: int, _: int) -> float:
        now_ms = simulation.now / _MS
        began_ms.append(now_ms)
        elapsed_ms = now_ms - began_ms[0]
        step_ms = place.target_ms / place.step_ratio * (1 + 0.05 * (num_rows - 1))
        step_ms *= fault.factor(elapsed_ms) * rng.lognormvariate(0, 0.05)
        # For ever: longer than any answer.
        return _MS * (step_ms + min(fault.stall_ms(elapsed_ms), 1e9))

    simulation = Simulation(
        target=target,
        draft=draft,
        policy=policy,
        costs=Costs(
            target_ns=target_ns,
            draft_ns=draft_ns,
            leg_ns=lambda: place.leg_ms * _MS * (0.8 + 0.4 * rng.random()),
            draft_message_ns=0.2 * _MS,
            target_message_ns=0.065 * _MS,
        ),
        max_tokens=place.num_tokens,
        max_guessed=seed % 5,
        num_sequences=place.num_sequences,
    )
    return simulation.run()


def speedup(place: Place, fault: DraftFault, *, make: Sequence[Policy], seed: int = 0) -> float:
    """Decode time of target-only over that of the policies, one after another."""
    outcomes = [answer(policy, place, fault, seed + k) for k, policy in enumerate(make)]
    alone_ns = sum(_alone_ns(place, seed + k) for k in range(len(make)))
    return alone_ns / sum(outcome.decode_ns for outcome in outcomes)


@cache
def _alone_ns(place: Place, seed: int) -> float:
    off = make_policy("off", gamma=1, max_draft_tokens=1)
    return answer(off, place, DraftFault(), seed).decode_ns
