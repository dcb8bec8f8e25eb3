"""What a policy knows about the pair: costs of a step, load, acceptance, latency; running means."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from hippo.speculation.row_costs import RowCosts, moved
from hippo.types import Timing

LOADED = 1.5  # sequences in a forward, in the mean, from which on one is not alone

_NEW_LOAD = 0.2  # weight of a new measurement
_NEW_MESSAGE = 0.1  # weight of a new message
_QUICKER, _SLOWER = 0.5, 0.3  # the same of a draft step: nothing makes it look quicker than it is


@dataclass(slots=True)
class Acceptance:
    """Decayed share of draft tokens that were right; the first of a run is counted apart."""

    prior: float = 0.85
    prior_weight: float = 4.0
    decay: float = 0.985  # below 1
    num_trials: int = 0  # since the last reset
    num_right: int = 0  # of these
    _right: float = 0.0
    _all: float = 0.0
    _first_right: float = 0.0
    _first_all: float = 0.0

    def observe(self, *, is_right: bool, is_first: bool, count: int = 1) -> None:
        """So many tokens in a row were right, or wrong; ``is_first``: the first of them is the
        first of a run."""
        kept = self.decay**count
        new = (1 - kept) / (1 - self.decay)  # each counts less by those behind it
        self.num_trials += count
        self.num_right += count * is_right
        self._right = self._right * kept + new * is_right
        self._all = self._all * kept + new
        if is_first:
            self._first_right = self._first_right * 0.9 + is_right
            self._first_all = self._first_all * 0.9 + 1

    def forget(self) -> None:
        """Keeps what is known as a weak prior only."""
        self.prior = self.rate
        self.prior_weight = 2.0
        self.num_trials = self.num_right = 0
        self._right = self._all = self._first_right = self._first_all = 0.0

    @property
    def rate(self) -> float:
        """Probability that a draft token is right, given that all before it are."""
        return (self._right + self.prior * self.prior_weight) / (self._all + self.prior_weight)

    @property
    def first_rate(self) -> float:
        """The same for the first token after a rejection."""
        return (self._first_right + 3 * self.rate) / (self._first_all + 3)


@dataclass(slots=True)
class Latency:
    """Times around the draft, in nanoseconds; 0 while unknown."""

    draft_step_ns: float = 0.0
    first_token_ns: float = 0.0  # from a rejection until its first draft token is at the target
    message_ns: float = 0.0  # of the draft's processor, a block with all that it sets off

    def observe_step(self, step_ns: int) -> None:
        weight = _QUICKER if step_ns < self.draft_step_ns else _SLOWER
        self.draft_step_ns = moved(self.draft_step_ns, step_ns, weight=weight)

    def observe_message(self, preempted_ns: int) -> None:
        self.message_ns += _NEW_MESSAGE * (preempted_ns - self.message_ns)

    def observe_first_token(self, delay_ns: float) -> None:
        self.first_token_ns = moved(self.first_token_ns, max(delay_ns, 1.0))


class _Kind(NamedTuple):
    """Which forwards have costs of their own."""

    context: int  # see _context_key
    is_shared: bool  # by several sequences

    def distance(self, other: _Kind) -> tuple[int, bool]:
        """The nearer, the more alike their costs."""
        return abs(self.context - other.context), self.is_shared != other.is_shared


@dataclass(slots=True)
class PairTimes:
    """What all sequences of one pair of services have measured together.

    Shared by the policies of a gateway, so that a new sequence begins with what is known of the
    machine and of the load. Costs are kept apart by context length, in steps of four times: what
    is behind a long prompt takes longer, and its rows cost less beside the rest. And forwards of
    one sequence are kept apart from those of several, which may run other code
    (hippo.models.static).
    """

    latency: Latency = field(default_factory=Latency)
    acceptance: Acceptance = field(default_factory=lambda: Acceptance(decay=0.998))
    num_sequences: float = 1.0  # that share a forward of the target
    _costs: dict[_Kind, RowCosts] = field(default_factory=dict)
    _latest: int = 0  # the context last measured

    @property
    def is_known(self) -> bool:
        """Whether a pace can be chosen by it."""
        return bool(self._costs) and self.latency.draft_step_ns > 0

    def costs(self, context_length: int | None = None) -> RowCosts:
        """Costs at this load, behind about so many tokens (None: as the last forward had), or the
        nearest that are known; empty ones if none are."""
        context = self._latest if context_length is None else _context_key(context_length)
        return self._nearest(_Kind(context, self.num_sequences >= LOADED))

    def _nearest(self, kind: _Kind) -> RowCosts:
        if not self._costs:
            return RowCosts()
        return self._costs[min(self._costs, key=kind.distance)]

    def observe_forward(self, num_rows: int, timing: Timing) -> None:
        """A sequence's ``num_rows`` rows ran in a forward."""
        shared = max(timing.num_sequences, 1)
        rows = timing.num_batch_rows or num_rows
        kind = _Kind(_context_key(timing.context_length), shared > 1)
        if kind not in self._costs:
            nearest = self._nearest(kind)
            self._costs[kind] = nearest.scaled_to(rows, timing.forward_ns, num_sequences=shared)
        self._latest = kind.context
        self._costs[kind].observe(rows, timing.forward_ns, num_sequences=shared)
        # Each of them says so once.
        self.num_sequences += (shared - self.num_sequences) * _NEW_LOAD / shared

    def observe_alone(self, timing: Timing) -> None:
        """A forward of one row of one sequence, already observed, while the draft rests."""
        kind = _Kind(_context_key(timing.context_length), is_shared=False)
        self._costs[kind].observe_alone(timing.forward_ns)

    def cost_table(self, most_rows: int, *, context_length: int | None = None) -> list[float]:
        """Nanoseconds of a forward at this load, if each sequence has 0, 1, ... rows in it.

        Rows are dear under load: what one sequence adds, all wait for. Taking others to do as it
        does, a sequence chooses what is best for all of them together.
        """
        return self.costs(context_length).table(most_rows, num_sequences=self.num_sequences)

    def cost(self, num_rows: int, *, context_length: int | None = None) -> float:
        """The same of one number of rows."""
        costs = self.costs(context_length)
        return costs.time_ns(num_rows, num_sequences=self.num_sequences)

    def known_rows(self, context_length: int | None = None) -> float:
        """How many rows of each sequence a forward may have at this load for its cost to be
        more than a guess."""
        weight = self.costs(context_length).known_weight
        return (weight - self.num_sequences + 1) / self.num_sequences


def _context_key(context_length: int) -> int:
    return context_length.bit_length() // 2


def expected_rate(
    num_first: int,
    num_most: int,
    *,
    costs: list[float],
    acceptance: Acceptance,
    latency: Latency,
    held_up_ns: float = 0.0,
) -> float:
    """Expected tokens a nanosecond, if the target waits for ``num_first`` draft tokens after a
    rejection and verifies at most ``num_most`` in a forward.

    One cycle goes from a rejection to the next: the draft's correction travels, the first block
    is verified, and while blocks are accepted whole each next one holds what was drafted in the
    meantime. ``costs[n]`` is the time of n rows, up to ``num_most + 1``; ``held_up_ns`` is what
    each verdict takes from the draft's time.
    """
    rate, first_rate = min(acceptance.rate, 0.995), min(acceptance.first_rate, 0.995)
    step_ns = latency.draft_step_ns
    cost = costs[num_first + 1]
    tokens = 1 + first_rate * (1 - rate**num_first) / (1 - rate)
    time_ns = cost
    if num_first:
        time_ns += latency.first_token_ns + (num_first - 1) * step_ns
        queue = max(0.0, cost - held_up_ns) / step_ns
    else:
        queue = max(0.0, (cost - held_up_ns - latency.first_token_ns) / step_ns + 1)
    going: float = first_rate * rate**num_first
    for turn in range(8):
        queue -= 1  # compared with the target's own token
        if queue < 1:
            time_ns += going * (1 - queue) * step_ns
            queue = 1
        num_tokens = min(int(queue), num_most)
        cost = costs[num_tokens + 1]
        survival = rate ** (num_tokens + 1)
        weight = going / (1 - survival) if turn == 7 else going
        tokens += weight * (1 - survival) / (1 - rate)
        time_ns += weight * cost
        going *= survival
        if going < 0.02:
            break
        num_drafted = max(0.0, cost - held_up_ns) / step_ns
        queue = min(queue - num_tokens + num_drafted, 2 * num_most)
    return tokens / time_ns
