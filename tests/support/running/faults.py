"""What can be wrong with a draft: a description that the benchmark and the simulator share."""

from __future__ import annotations

import math
from dataclasses import dataclass

_FORMS = (
    "none, random, slow:FACTOR, stall:MS,MS (works so long, stands still so long, in turn; "
    "'ever' for the second), right-then-wrong:TOKENS,TOKENS (in turn; 'ever' for the second), "
    "slow-then-quick:FACTOR,MS (slow so long, then quick so long, in turn)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFault:
    """How a draft misbehaves in each answer; the defaults are a draft that does not.

    Times count from the answer's first draft step, indices from its first token.
    """

    name: str = "none"
    is_random: bool = False
    slow_factor: float = 1.0  # a step takes so many times as long, for slow_ms ...
    slow_ms: float = math.inf  # ... and then as usual for as long, in turn
    working_ms: float = math.inf
    stalled_ms: float = 0.0
    num_right: float = math.inf  # tokens as they are, then ...
    num_wrong: float = 0.0  # ... so many that are certainly not what the draft would have said

    def is_wrong_at(self, index: int) -> bool:
        """Whether the draft is wrong about the token with this completion index."""
        if self.is_random:
            return True
        if not self.num_wrong:
            return False
        return _phase(index, self.num_right, self.num_wrong) >= self.num_right

    def stall_ms(self, elapsed_ms: float) -> float:
        """How long a step that would begin now stands still first."""
        if not self.stalled_ms:
            return 0.0
        phase = _phase(elapsed_ms, self.working_ms, self.stalled_ms)
        return 0.0 if phase < self.working_ms else self.working_ms + self.stalled_ms - phase

    def factor(self, elapsed_ms: float) -> float:
        """By how much a step that begins now is slower than usual."""
        is_slow = _phase(elapsed_ms, self.slow_ms, self.slow_ms) < self.slow_ms
        return self.slow_factor if is_slow else 1.0


def parse_fault(text: str) -> DraftFault:
    """``slow:10`` and the like; raises ValueError that says which forms there are."""
    name, _, rest = text.partition(":")
    try:
        numbers = [math.inf if part == "ever" else float(part) for part in rest.split(",") if part]
        if any(not number > 0 for number in numbers):
            raise ValueError
        match name, numbers:
            case ("none", []):
                return DraftFault(name=text)
            case ("random", []):
                return DraftFault(name=text, is_random=True)
            case ("slow", [factor]):
                return DraftFault(name=text, slow_factor=factor)
            case ("slow-then-quick", [factor, slow_ms]):
                return DraftFault(name=text, slow_factor=factor, slow_ms=slow_ms)
            case ("stall", [working_ms, stalled_ms]):
                return DraftFault(name=text, working_ms=working_ms, stalled_ms=stalled_ms)
            case ("right-then-wrong", [num_right, num_wrong]):
                return DraftFault(name=text, num_right=num_right, num_wrong=num_wrong)
    except ValueError:
        pass
    raise ValueError(f"{text!r} is no fault of a draft; there are {_FORMS}")


def _phase(position: float, first: float, second: float) -> float:
    """Where in a period of two parts a position is."""
    period = first + second
    return position if math.isinf(period) else math.fmod(position, period)
