"""The protocol between an engine and the core of one sequence, shared by draft and target.

A core decides which ids are fed next and which messages are sent. It uses no device, no network and
no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hippo.types import Timing


@dataclass(frozen=True, slots=True)
class Step:
    """One forward: the ids to feed at completion indices from ``start_index`` on.

    The KV cache must be rolled back to ``start_index`` completion ids before the forward. The last
    ``num_guessed`` ids are a guess that the forward verifies: draft tokens on the target, its own
    guess on the draft. The logits of the last ``num_guessed + 1`` rows are used, for the completion
    indices from ``first_index`` on.
    """

    start_index: int
    token_ids: tuple[int, ...]
    num_guessed: int = 0

    @property
    def first_index(self) -> int:
        """The completion index for which the first used row has logits."""
        return self.start_index + len(self.token_ids) - self.num_guessed

    @property
    def guess(self) -> tuple[int, ...]:
        return self.token_ids[len(self.token_ids) - self.num_guessed :]


PROMPT_STEP = Step(-1, (0,))
"""Represents a prefill, whose last row has logits for index 0."""


@dataclass(frozen=True, slots=True)
class Wait:
    """No step before the time ``until_ns``, unless a message arrives."""

    until_ns: int


class Core(Protocol):
    """The speculation of one sequence in one service
    (:class:`hippo.speculation.verifier.Verifier`, :class:`hippo.speculation.drafter.Drafter`)."""

    @property
    def is_finished(self) -> bool:
        """Whether the sequence is over, apart from messages that were not taken yet."""
        ...

    @property
    def fed_ids(self) -> Sequence[int]:
        """The leading completion ids whose keys and values the KV cache holds; a forward in
        progress may write after them."""
        ...

    def set_max_tokens(self, max_tokens: int) -> None:
        """Replaces the initial limit; only before ``begin``."""

    def begin(self, token_id: int, timing: Timing, notes: Sequence[Any] = ()) -> None:
        """Takes ``token_id``, which the prefill's logits gave for index 0; called once."""

    def next_step(self, now_ns: int) -> Step | Wait | None:
        """Returns the next forward, or a wait; None: nothing before the next message or ``begin``.

        A returned step must be finished before the next call.
        """

    def history(self, step: Step) -> Sequence[int]:
        """Returns the completion ids before ``step.first_index`` as of the step's beginning."""
        ...

    def finish_step(
        self,
        step: Step,
        token_ids: Sequence[int],
        timing: Timing,
        notes: Sequence[Any] = (),
    ) -> int:
        """Takes the model's tokens for the indices from ``step.first_index`` on, and the notes of
        their rows (``hippo.sampling.sampler.RowNotes``); returns how many tokens were used.
        Messages that arrived earlier must be passed to ``receive`` first."""
        ...

    def receive(self, message: Any) -> None:
        """Takes a message, at any time, also while a forward runs. Raises InvalidRequestError for
        a message that breaks the rules."""

    def take_messages(self) -> list[Any]:
        """Returns the messages to send now, in order; to be called after each call above."""
        ...
