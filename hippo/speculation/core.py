"""What an engine and the core of a sequence, its ``Drafter`` or ``Verifier``, exchange.

A core decides which ids are fed next and which messages are sent. It uses no device, no network and
no clock. The engine calls ``begin`` once, with the token that the prefill's logits gave for index
0, and ``set_max_tokens`` only before. Then it calls ``next_step``, which returns the next forward,
a wait, or None if nothing happens before the next message, and must finish a step before it asks
for the next one. ``finish_step`` takes the model's tokens for the indices from the step's
``first_index`` on, and the notes of their rows (``hippo.sampling.sampler.RowNotes``), and returns
how many tokens were used. ``history`` are the completion ids before ``first_index`` as of the
step's beginning. ``receive`` takes a message, at any time, also while a forward runs: those that
came before a forward's end must be received before ``finish_step``. It raises InvalidRequestError
for a message that breaks the rules. After each of these calls ``take_messages`` returns the
messages to send now, in order. ``fed_ids`` are the leading completion ids whose keys and values the
KV cache holds; a forward in progress may write after them.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Step:
    """One forward: the ids to feed at completion indices from ``start_index`` on.

    The KV cache must be rolled back to ``start_index`` completion ids before the forward. The last
    ``num_guessed`` ids are a guess that the forward verifies: draft tokens on the target, its own
    guess on the draft. The logits of the last ``num_guessed + 1`` rows are used, for the completion
    indices from ``first_index`` on. No later step begins before ``least_start`` (None: before this
    one).
    """

    start_index: int
    token_ids: tuple[int, ...]
    num_guessed: int = 0
    least_start: int | None = field(default=None, compare=False)

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
