"""Replays traces on a machine: policies against target-only and against no overhead."""

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hippo.errors import InvalidRequestError
from hippo.lab.simulation.devices import Outcome
from hippo.lab.simulation.machine import Machine
from hippo.lab.simulation.simulator import SecondChoice, Simulation, TokenFunction
from hippo.lab.simulation.traces import Trace
from hippo.speculation.estimates import PairTimes
from hippo.speculation.policies import (
    DEFAULT_GAMMA,
    MAX_DRAFT_TOKENS,
    POLICY_NAMES,
    Gamma,
    Policy,
    make_policy,
)
from hippo.types import FinishReason

_END, _WRONG, _OTHER = 1_000_000, 2_000_000, 3_000_000
_MS = 1e6
# Share of rejections after which the rest of the broken run fits the answer: 35 % to 74 % of those
# of the bundled target, by draft (docs/performance.md).
_FIT = 0.5
# A draft doubts as many of its right tokens as of its wrong ones. Of its wrong tokens, its second
# choice is right in 54 % to 94 % on the bundled target, by draft (docs/performance.md).
_DOUBT = 0.4  # probability of the second choice of a token in doubt
_SECOND_RIGHT = 0.6
_LOOK_BACK = 2 * MAX_DRAFT_TOKENS  # tokens of a run that a draft can be ahead


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """A policy's name, with the draft length of `serial` and `vpsd`."""

    name: str
    gamma: Gamma = DEFAULT_GAMMA

    def new_policy(self, times: PairTimes | None = None) -> Policy:
        """Returns a policy for one sequence; ``times`` are those measured by earlier ones."""
        return make_policy(
            self.name, gamma=self.gamma, max_draft_tokens=MAX_DRAFT_TOKENS, times=times
        )

    @property
    def title(self) -> str:
        """The name in the benchmarks' tables: "serial γ=5", "adaptive", "target-only"."""
        if self.name == "off":
            return "target-only"
        return f"{self.name} γ={self.gamma}" if self.name in ("serial", "vpsd") else self.name


def parse_policies(text: str) -> list[PolicyChoice]:
    """Parses a list such as ``adaptive,serial:5,vpsd:auto,serial:best``; "best" gives a gamma of 0.

    Raises InvalidRequestError for an unknown policy or draft length.
    """
    choices = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, gamma = part.partition(":")
        if name not in POLICY_NAMES:
            raise InvalidRequestError(
                f"unknown policy {name!r}; choose from {', '.join(POLICY_NAMES)}, serial and vpsd "
                "with a draft length as in serial:7, serial:auto or serial:best"
            )
        if gamma and name not in ("serial", "vpsd"):
            raise InvalidRequestError(f"{part!r}: only serial and vpsd have a draft length")
        if gamma == "best":
            choices.append(PolicyChoice(name, 0))
        elif gamma == "auto":
            choices.append(PolicyChoice(name, "auto"))
        elif gamma and not (gamma.isdecimal() and 1 <= int(gamma) <= MAX_DRAFT_TOKENS):
            raise InvalidRequestError(
                f"{part!r}: the draft length must be 1 to {MAX_DRAFT_TOKENS}, auto or best"
            )
        else:
            choices.append(PolicyChoice(name, int(gamma or DEFAULT_GAMMA)))
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
    """Simulates one sequence from both prefills to the trace's end.

    ``times`` are shared between sequences, as in a gateway. The trace's last token becomes an end
    token, so that neither model knows the answer's length before.
    """
    length = len(trace.agrees)
    target, draft = _sides(trace.agrees, trace.fits)
    simulation = Simulation(
        target=target, draft=draft, policy=policy.new_policy(times), costs=machine.costs(seed),
        max_tokens=length + 4 * MAX_DRAFT_TOKENS, end_token_ids=(_END,),
        num_prompt_tokens=trace.num_prompt_tokens,
        num_draft_prompt_tokens=trace.num_draft_prompt_tokens,
        second_choice=_second_choice(trace.agrees, target),
    )  # fmt: skip
    outcome = simulation.run(most_events=4000 + 1000 * length)
    assert outcome.verdicts[-1].finish_reason is FinishReason.STOP, "a trace ends with its token"
    return outcome


def _sides(
    agrees: Sequence[bool], known: Mapping[int, bool]
) -> tuple[TokenFunction, TokenFunction]:
    """Returns target and draft for a trace; the target's token at an index is that index.

    After a wrong token of its own the draft continues either as along the target's tokens, or
    wrong. Which of the two, depends on the wrong token's place alone; places that are not ``known``
    are drawn.
    """
    length = len(agrees)
    fits = [known.get(k, random.Random(k).random() < _FIT) for k in range(length)]

    def target(history: Sequence[int]) -> int:
        return _END if len(history) == length - 1 else len(history)

    def draft(history: Sequence[int]) -> int:
        place = len(history)
        if place < length and agrees[place] and fits_after(history):
            return target(history)
        return _WRONG + place

    def fits_after(history: Sequence[int]) -> bool:
        last = history[-_LOOK_BACK:]
        wrong = next((token % _END for token in reversed(last) if token >= _WRONG), length)
        return wrong >= length or fits[wrong]

    return target, draft


def _second_choice(agrees: Sequence[bool], target: TokenFunction) -> SecondChoice:
    """Returns the draft's second choices for a trace, of which doubts and right ones are drawn."""
    num_wrong = agrees.count(False)
    share_doubted = num_wrong / max(len(agrees) - num_wrong, 1)

    def second(history: Sequence[int]) -> tuple[int, float]:
        place = len(history)
        rng = random.Random(f"second {place}")
        is_right = rng.random() < _SECOND_RIGHT
        if place >= len(agrees) or (agrees[place] and rng.random() >= share_doubted):
            return _OTHER + place, 0.0
        return (_OTHER + place if agrees[place] or not is_right else target(history)), _DOUBT

    return second


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over several simulated sequences, so long answers weigh more."""

    outcomes: tuple[Outcome, ...]

    @property
    def decode_ns(self) -> float:
        """Total time from first to last token."""
        return sum(outcome.decode_ns for outcome in self.outcomes)

    @property
    def total_ns(self) -> float:
        """Total time with the prefills."""
        return sum(outcome.total_ns for outcome in self.outcomes)

    @property
    def ms_per_token(self) -> float:
        """Decode time per token; the first token of an answer belongs to the prefill."""
        num_tokens = sum(len(outcome.output_ids) - 1 for outcome in self.outcomes)
        return self.decode_ns / _MS / num_tokens

    @property
    def mean_tokens_per_forward(self) -> float:
        """Mean tokens per target forward: 1 + accepted tokens, reused ones included, / forwards."""
        num_accepted = self._sum("num_accepted_tokens") + self._sum("num_accepted_reused")
        return 1 + num_accepted / self._sum("num_forwards")

    @property
    def mean_run_length(self) -> float:
        """Mean tokens settled between two rejections, the corrected token included."""
        return statistics.fmean(
            length for outcome in self.outcomes for length in outcome.stats.all_run_lengths
        )

    @property
    def acceptance(self) -> float:
        """Acceptance rate: accepted / verified draft tokens; 0 if none was verified."""
        num_verified = self._sum("num_draft_tokens")
        return self._sum("num_accepted_tokens") / num_verified if num_verified else 0.0

    @property
    def target_wait_share(self) -> float:
        """Share of the decode time in which the target waits for the draft."""
        return self._sum("target_wait_ns") / self.decode_ns

    def _sum(self, name: str) -> int:
        return sum(getattr(outcome.stats, name) for outcome in self.outcomes)


def replay_all(policy: PolicyChoice, traces: Sequence[Trace], machine: Machine) -> Totals:
    """Simulates all traces in turn, as one gateway would answer them, trace ``k`` with seed ``k``.

    A policy that measures times keeps them from one answer to the next, and first runs the first
    trace once to measure them.
    """
    times = PairTimes()
    if policy.name == "adaptive" or policy.gamma == "auto":
        replay(policy, traces[0], machine, times=times)
    return Totals(
        tuple(
            replay(policy, trace, machine, seed=seed, times=times)
            for seed, trace in enumerate(traces)
        )
    )


GAMMAS = (1, 2, 3, 4, 5, 7, 10, 15, 22, MAX_DRAFT_TOKENS)


def best_gamma(name: str, traces: Sequence[Trace], machine: Machine) -> PolicyChoice:
    """Returns the draft length with the least decode time; of equal ones the shortest."""
    choices = [PolicyChoice(name, gamma) for gamma in GAMMAS]
    return min(choices, key=lambda choice: replay_all(choice, traces, machine).decode_ns)


@dataclass(frozen=True, slots=True)
class Row:
    """The prediction for one policy; speedups are against target-only on the same traces."""

    policy: PolicyChoice
    totals: Totals
    ideal: Totals  # the same policy and step times without overhead
    decode_speedup: float
    end_to_end_speedup: float
    helped_speedup: float | None  # end to end, if a helper shares the prefill

    @property
    def efficiency(self) -> float:
        """Decode speed divided by the decode speed without overhead."""
        return self.ideal.decode_ns / self.totals.decode_ns


def compare(
    policies: Sequence[PolicyChoice], traces: Sequence[Trace], machine: Machine
) -> list[Row]:
    """Returns a row per policy; for a gamma of 0 it uses the best draft length on these traces."""
    off = replay_all(PolicyChoice("off"), traces, machine)
    ideal = machine.ideal()
    rows = []
    for policy in policies:
        chosen = policy if policy.gamma else best_gamma(policy.name, traces, machine)
        totals = replay_all(chosen, traces, machine)
        helped = replay_all(chosen, traces, machine.helped()) if machine.helper_layers else None
        row = Row(
            policy=chosen, totals=totals, ideal=replay_all(chosen, traces, ideal),
            decode_speedup=off.decode_ns / totals.decode_ns,
            end_to_end_speedup=off.total_ns / totals.total_ns,
            helped_speedup=off.total_ns / helped.total_ns if helped else None,
        )  # fmt: skip
        rows.append(row)
    return rows
