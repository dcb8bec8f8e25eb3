"""What one set-up costs, as plain numbers in milliseconds, and as the simulator's callables."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field

from hippo.simulation.devices import Costs

_MS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardTime:
    """Time of one forward: linear in rows and in cached tokens."""

    one_row_ms: float
    row_ms: float = 0.0  # each row after the first
    kilotoken_ms: float = 0.0  # each 1,000 tokens cached before the rows

    def ms(self, num_rows: int, context: int) -> float:
        """Milliseconds of ``num_rows`` rows (at least 1) behind ``context`` cached tokens."""
        return self.one_row_ms + self.row_ms * (num_rows - 1) + self.kilotoken_ms * context / 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Everything that takes time in one set-up of a pair.

    ``leg_ms`` is a latency, a message between a service and the gateway one way; the messages'
    and the scheduling's times occupy a device. ``jitter`` is the spread (sigma of a lognormal) of
    step times, legs and scheduling.
    """

    name: str
    target: ForwardTime
    draft: ForwardTime
    target_prefill_ms: float = 0.0
    draft_prefill_ms: float = 0.0
    selection_ms: float = 0.0  # from the start until the draft may begin its prefill
    leg_ms: float = 0.0
    draft_message_ms: float = 0.0  # of the device, a message
    target_message_ms: float = 0.0
    target_scheduling_ms: float = 0.0  # between two steps
    jitter: float = 0.0
    sources: tuple[str, ...] = field(default=())  # where the numbers come from

    def costs(self, seed: int = 0) -> Costs:
        """For the simulator; the same seed gives the same delays."""
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

    def ideal(self) -> Machine:
        """The same step and prefill times with nothing else: what efficiency is measured by."""
        return dataclasses.replace(
            self,
            name=f"{self.name}, ideal",
            leg_ms=0.0,
            draft_message_ms=0.0,
            target_message_ms=0.0,
            target_scheduling_ms=0.0,
            jitter=0.0,
        )
