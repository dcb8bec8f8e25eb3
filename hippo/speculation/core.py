"""What an engine drives: one sequence's core, the same protocol for draft and target.

A core decides what is fed next and what is said; it knows no device, no network and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hippo.types import Timing, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Step:
    """One forward: ids to feed at completion indices from ``start_index`` on.

    The cache must be rolled back to ``start_index`` completion ids before it. The last
    ``num_guessed`` ids are a guess that the forward checks: the target's at the draft's tokens, or
    the draft's own. The logits of the last ``num_guessed + 1`` rows are of use, for the indices
    from ``first_index`` on.
    """

    start_index: int
    token_ids: tuple[int, ...]
    num_guessed: int = 0

    @property
    def first_index(self) -> int:
        """The index that the first row of use has logits for."""
        return self.start_index + len(self.token_ids) - self.num_guessed

    @property
    def guess(self) -> tuple[int, ...]:
        return self.token_ids[len(self.token_ids) - self.num_guessed :]


PROMPT_STEP = Step(-1, (0,))
"""Stands for a prefill, whose last row has logits for index 0."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do before ``until_ns``, unless a message arrives."""

    until_ns: int


class Core(Protocol):
    """One sequence's side of the speculation (:class:`hippo.speculation.verifier.Verifier`,
    :class:`hippo.speculation.drafter.Drafter`)."""

    @property
    def is_finished(self) -> bool:
        """Whether the sequence is over and the last message was taken or is about to be."""
        ...

    @property
    def fed_ids(self) -> Sequence[int]:
        """The leading completion ids whose keys and values the cache holds, between two forwards
        and whatever a forward in progress writes behind them."""
        ...

    def set_max_tokens(self, max_tokens: int) -> None:
        """Another limit than at first; before ``begin``."""

    def begin(self, token_id: int, timing: Timing, logprobs: Sequence[TokenLogprobs] = ()) -> None:
        """The prefill is over and its logits gave ``token_id`` for index 0; once."""

    def next_step(self, now_ns: int) -> Step | Wait | None:
        """What the device does next; None: nothing before the next message (or ``begin``).

        A step that is returned must be finished before the next call.
        """

    def history(self, step: Step) -> Sequence[int]:
        """The completion ids before ``step.first_index``, as they were when the step began."""
        ...

    def finish_step(
        self,
        step: Step,
        token_ids: Sequence[int],
        timing: Timing,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> int:
        """Takes the model's tokens for ``step.first_index`` and after; how many were of use.

        Every message that has arrived must have been received before.
        """
        ...

    def receive(self, message: Any) -> None:
        """A message arrived, at any time, also while a forward runs; raises InvalidRequestError
        for one that breaks the rules."""

    def take_messages(self) -> list[Any]:
        """What is to be said now, in order; ask after each of the calls above."""
        ...
