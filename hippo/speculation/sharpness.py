"""How much the noise counts in the draft's choice, learned from the target's tokens.

The draft makes each choice at all sharpnesses, and proposes that of the sharpness that was right
most often of late; docs/algorithms.md, "Sharpness", says why.
"""

import math
from collections.abc import Sequence

# Factors on the scaled logits before the noise: as the target draws, in between, and without noise.
SHARPNESSES = (1.0, 2.0, math.inf)
_MEMORY = 0.998  # weight of a token, relative to the next: 500 tokens, as of a pair's acceptance


class Sharpness:
    """The best sharpness for sequences of one temperature; not thread-safe."""

    def __init__(self) -> None:
        self._right = [0.0] * len(SHARPNESSES)

    @property
    def place(self) -> int:
        """The place in SHARPNESSES of the one that was right most often, of equal ones the first;
        at first no sharpening."""
        return max(range(len(SHARPNESSES)), key=self._right.__getitem__)

    def observe_choices(self, choices: Sequence[int], token_id: int) -> None:
        for place, choice in enumerate(choices):
            self._right[place] = _MEMORY * self._right[place] + (choice == token_id)


class SharpnessByTemperature:
    def __init__(self) -> None:
        self._known: dict[int, Sharpness] = {}  # for each tenth of a degree

    def at(self, temperature: float) -> Sharpness | None:
        """Returns the sharpness of a temperature; None at 0, where there is no noise."""
        if temperature <= 0.0:
            return None
        return self._known.setdefault(round(10 * temperature), Sharpness())
