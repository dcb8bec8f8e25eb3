"""Replays traces on a machine: one policy, several policies, against target-only and the ideal."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hippo.errors import InvalidRequestError
from hippo.simulation.devices import Outcome
from hippo.simulation.machine import Machine
from hippo.simulation.simulator import Simulation, TokenFunction
from hippo.simulation.traces import Trace
from hippo.speculation.estimates import PairTimes
from hippo.speculation.policies import MAX_DRAFT_TOKENS, POLICY_NAMES, Policy, make_policy
from hippo.types import FinishReason

_END, _WRONG = 1_000_000, 2_000_000
_MS = 1e6


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """A policy by name with its block length, where it has one."""

    name: str
    gamma: int = 5

    def make(self, times: PairTimes | None = None) -> Policy:
        """A fresh policy for one sequence; ``times``: what those before it have measured."""
        return make_policy(
            self.name, gamma=self.gamma, max_draft_tokens=MAX_DRAFT_TOKENS, times=times
        )

    @property
    def title(self) -> str:
        """As in the benchmarks: "serial γ=5", "adaptive", "target-only"."""
        if self.name == "off":
            return "target-only"
        return f"{self.name} γ={self.gamma}" if self.name in ("serial", "vpsd") else self.name


def parse_policies(text: str) -> list[PolicyChoice]:
    """``adaptive,serial:5,serial:best`` and the like; gamma "best" is 0, to be searched for.

    Raises InvalidRequestError for an unknown policy or block length.
    """
    choices = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, gamma = part.partition(":")
        if name not in POLICY_NAMES:
            raise InvalidRequestError(
                f"unknown policy {name!r}; choose from {', '.join(POLICY_NAMES)}, serial and vpsd "
                "with a block length as in serial:7 or serial:best"
            )
        if gamma and name not in ("serial", "vpsd"):
            raise InvalidRequestError(f"{part!r}: only serial and vpsd have a block length")
        if gamma == "best":
            choices.append(PolicyChoice(name, 0))
        elif gamma and not (gamma.isdigit() and 1 <= int(gamma) <= MAX_DRAFT_TOKENS):
            raise InvalidRequestError(
                f"{part!r}: the block length must be 1 to {MAX_DRAFT_TOKENS}, or best"
            )
        else:
            choices.append(PolicyChoice(name, int(gamma or 5)))
    if not choices:
        raise InvalidRequestError(f"no policy given; choose from {', '.join(POLICY_NAMES)}")
    return choices


def replay(
    policy: PolicyChoice,
    trace: Trace,
    machine: Machine,
    *,
    seed: int = 0,
    times: PairTimes | None = None,
) -> Outcome:
    """One sequence from both prefills to the trace's end; ``times``, as a gateway shares them.

    The trace's last token is an end token, as it is for the bench's clips: nobody knows the
    answer's length beforehand.
    """
    length = len(trace.agrees)
    target, draft = _sides(trace.agrees)
    simulation = Simulation(
        target=target,
        draft=draft,
        policy=policy.make(times),
        costs=machine.costs(seed),
        max_tokens=length + 4 * MAX_DRAFT_TOKENS,
        end_token_ids=(_END,),
        num_prompt_tokens=trace.num_prompt_tokens,
        num_draft_prompt_tokens=trace.num_draft_prompt_tokens,
    )
    outcome = simulation.run(most_events=4000 + 1000 * length)
    assert outcome.verdicts[-1].finish_reason is FinishReason.STOP, "a trace ends with its token"
    return outcome


def _sides(agrees: Sequence[bool]) -> tuple[TokenFunction, TokenFunction]:
    """Target and draft of a trace; a token is its own place."""
    length = len(agrees)

    def target(history: Sequence[int]) -> int:
        return _END if len(history) == length - 1 else len(history)

    def draft(history: Sequence[int]) -> int:
        place = len(history)
        return target(history) if place < length and agrees[place] else _WRONG + place

    return target, draft


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the sequences of several traces, so that long answers count for more."""

    outcomes: tuple[Outcome, ...]

    @property
    def decode_ns(self) -> float:
        """From each first token to the last."""
        return sum(outcome.decode_ns for outcome in self.outcomes)

    @property
    def total_ns(self) -> float:
        """Prefills too."""
        return sum(outcome.total_ns for outcome in self.outcomes)

    @property
    def ms_per_token(self) -> float:
        """Of the decoding: each answer's first token is the prefill's."""
        num_tokens = sum(len(outcome.output_ids) - 1 for outcome in self.outcomes)
        return self.decode_ns / _MS / num_tokens

    @property
    def tokens_per_forward(self) -> float:
        """1 + accepted / forwards."""
        return 1 + self._sum("num_accepted_tokens") / self._sum("num_forwards")

    @property
    def run_length(self) -> float:
        """Tokens settled between two rejections."""
        return statistics.fmean(
            length for outcome in self.outcomes for length in outcome.stats.all_run_lengths
        )

    @property
    def acceptance(self) -> float:
        """Accepted over verified draft tokens; 0 when none was verified."""
        num_verified = self._sum("num_draft_tokens")
        return self._sum("num_accepted_tokens") / num_verified if num_verified else 0.0

    @property
    def target_wait_share(self) -> float:
        """Of the decoding, in which the target's device waits for the draft."""
        return self._sum("target_wait_ns") / self.decode_ns

    def _sum(self, name: str) -> int:
        return sum(getattr(outcome.stats, name) for outcome in self.outcomes)


def replay_all(policy: PolicyChoice, traces: Sequence[Trace], machine: Machine) -> Totals:
    """Every trace in turn, as one gateway would answer them; trace ``k`` runs with seed ``k``.

    What the policy measures it keeps for the next answer; the first trace is run once before.
    """
    times = PairTimes()
    if policy.name == "adaptive":
        replay(policy, traces[0], machine, times=times)
    return Totals(
        tuple(
            replay(policy, trace, machine, seed=seed, times=times)
            for seed, trace in enumerate(traces)
        )
    )


GAMMAS = (1, 2, 3, 4, 5, 7, 10, 15, 22, 32)


def best_gamma(name: str, traces: Sequence[Trace], machine: Machine) -> PolicyChoice:
    """The block length with the least decode time; of equals the shortest."""
    choices = [PolicyChoice(name, gamma) for gamma in GAMMAS]
    return min(choices, key=lambda choice: replay_all(choice, traces, machine).decode_ns)


@dataclass(frozen=True, slots=True)
class Row:
    """One policy's prediction; speedups are against target-only on the same traces."""

    policy: PolicyChoice
    totals: Totals
    ideal: Totals  # the same policy, the same step times, no overhead
    decode_speedup: float
    end_to_end_speedup: float

    @property
    def efficiency(self) -> float:
        """Speed over that of the ideal, decode only."""
        return self.ideal.decode_ns / self.totals.decode_ns


def compare(
    policies: Sequence[PolicyChoice], traces: Sequence[Trace], machine: Machine
) -> list[Row]:
    """A row a policy; a gamma of 0 is searched for on these traces, overhead included."""
    off = replay_all(PolicyChoice("off"), traces, machine)
    ideal = machine.ideal()
    rows = []
    for policy in policies:
        chosen = policy if policy.gamma else best_gamma(policy.name, traces, machine)
        totals = replay_all(chosen, traces, machine)
        rows.append(
            Row(
                policy=chosen,
                totals=totals,
                ideal=replay_all(chosen, traces, ideal),
                decode_speedup=off.decode_ns / totals.decode_ns,
                end_to_end_speedup=off.total_ns / totals.total_ns,
            )
        )
    return rows
