"""A model of one sequence's KV cache: which token's keys each position holds."""

from __future__ import annotations

from collections.abc import Sequence

from hippo.speculation.core import Step


class KeyCache:
    """The completion ids whose keys the cache holds.

    A step keeps what lies before its first row and writes its own rows. What lay behind them is of
    no later use, so it is not kept: a core that counts on it gets a gap.
    """

    def __init__(self) -> None:
        self._ids: list[int] = []

    @property
    def ids(self) -> Sequence[int]:
        """The ids whose keys are held, from completion index 0; a live view."""
        return self._ids

    def feed(self, step: Step) -> list[int]:
        """Writes a step's rows; returns the ids that its first used row attends to, its own
        included."""
        assert step.start_index <= len(self._ids), "a step begins behind a gap in the cache"
        self._ids[step.start_index :] = step.token_ids
        return self._ids[: step.first_index]
