"""The times of one set-up in milliseconds, and as ``Costs`` for the simulator."""

import dataclasses
import random
from dataclasses import dataclass, field
from typing import Protocol

from hippo.lab.simulation.devices import Costs

_MS = 1_000_000


class ForwardCost(Protocol):
    """Time of one forward, as a function of its rows and of the cached tokens."""

    def ms(self, num_rows: int, context: int) -> float:
        """Returns the milliseconds of ``num_rows`` rows (at least 1) after ``context`` cached
        tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardTime:
    """A ForwardCost that is linear in rows and in cached tokens."""

    one_row_ms: float
    row_ms: float = 0.0  # per row after the first
    kilotoken_ms: float = 0.0  # per 1,000 cached tokens

    def ms(self, num_rows: int, context: int) -> float:
        return self.one_row_ms + self.row_ms * (num_rows - 1) + self.kilotoken_ms * context / 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """All times of one set-up of a pair.

    ``leg_ms`` is the latency of a message between a service and the gateway, one way. Times of
    messages and of scheduling occupy a device. ``jitter`` is the sigma of a lognormal factor on
    step times, legs and scheduling.
    """

    name: str
    target: ForwardCost
    draft: ForwardCost
    target_prefill_ms: float = 0.0
    draft_prefill_ms: float = 0.0
    selection_ms: float = 0.0  # from the start to the beginning of the draft's prefill
    helper_layers: int = 0  # of the target, that a prefill helper on the draft's device can have
    helped_prefill_ms: float = 0.0  # target_prefill_ms with it
    helped_selection_ms: float = 0.0
    tower_ms: float = 0.0  # the target's vision tower, before the prefills; in no other time
    leg_ms: float = 0.0
    draft_message_ms: float = 0.0  # device time per message
    target_message_ms: float = 0.0
    target_scheduling_ms: float = 0.0  # between two steps
    jitter: float = 0.0
    sources: tuple[str, ...] = field(default=())  # where the numbers come from

    def costs(self, seed: int = 0) -> Costs:
        """Returns the costs for the simulator; the same seed gives the same delays."""
        rng = random.Random(seed)

        def noise() -> float:
            return rng.lognormvariate(0.0, self.jitter) if self.jitter else 1.0

        return Costs(
            target_ns=lambda rows, context: _MS * self.target.ms(rows, context) * noise(),
            draft_ns=lambda rows, context: _MS * self.draft.ms(rows, context) * noise(),
            target_prefill_ns=round(_MS * self.target_prefill_ms),
            draft_prefill_ns=round(_MS * self.draft_prefill_ms),
            draft_prefill_delay_ns=round(_MS * self.selection_ms),
            leg_ns=lambda: _MS * self.leg_ms * noise(),
            draft_message_ns=_MS * self.draft_message_ms,
            target_message_ns=_MS * self.target_message_ms,
            target_scheduling_ns=lambda: _MS * self.target_scheduling_ms * noise(),
        )

    def helped(self) -> "Machine":
        """Returns the machine with the helper's times."""
        prefill_ms, selection_ms = self.helped_prefill_ms, self.helped_selection_ms
        return dataclasses.replace(self, target_prefill_ms=prefill_ms, selection_ms=selection_ms)

    def ideal(self) -> "Machine":
        """Returns the machine without overhead (only steps and prefills), to compute efficiency."""
        return dataclasses.replace(
            self, name=f"{self.name}, ideal", leg_ms=0.0, draft_message_ms=0.0,
            target_message_ms=0.0, target_scheduling_ms=0.0, jitter=0.0,
        )  # fmt: skip
