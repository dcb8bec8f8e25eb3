"""Scores: statements against facts, and agreement of content tokens and of template tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from demo.training.batches import IntArray
from demo.world import texts
from demo.world.texts import Statement

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ATTRIBUTES = (
    "count", "position", "colour", "shape", "direction", "event", "size", "new_colour", "time",
)  # fmt: skip


@dataclass(slots=True)
class Tally:
    """The number of right cases, and of all cases."""

    right: int = 0
    total: int = 0

    def add_case(self, is_right: bool) -> None:
        self.right += is_right
        self.total += 1

    @property
    def percent(self) -> float:
        """Percentage of right cases; 0 without cases."""
        return 100.0 * self.right / max(1, self.total)


@dataclass(slots=True)
class Score:
    """Counts of right statements by attribute; `values` counts the true values."""

    strict: dict[str, Tally] = field(default_factory=dict)
    placed: dict[str, Tally] = field(default_factory=dict)
    by_value: dict[str, dict[str, Tally]] = field(default_factory=dict)
    recall: Tally = field(default_factory=Tally)
    values: dict[str, Counter[str]] = field(default_factory=dict)

    def add_clip(self, said: Sequence[Statement], true: Sequence[Statement]) -> None:
        """Judge the statements about one clip.

        `strict` counts every statement; one about an empty place is wrong. `placed` counts only
        statements about places with an object, and `by_value` counts these for each true value.
        `recall` is the share of facts that were said.
        """
        known = {(fact.cell, fact.attribute): fact.value for fact in true}
        occupied = {fact.cell for fact in true}
        for statement in said:
            value = known.get((statement.cell, statement.attribute))
            self.strict.setdefault(statement.attribute, Tally()).add_case(value == statement.value)
            if statement.cell in occupied and value is not None:
                is_right = value == statement.value
                self.placed.setdefault(statement.attribute, Tally()).add_case(is_right)
                values = self.by_value.setdefault(statement.attribute, {})
                values.setdefault(value, Tally()).add_case(is_right)
        mentioned = set(said)
        for fact in true:
            self.recall.add_case(fact in mentioned)
            self.values.setdefault(fact.attribute, Counter())[fact.value] += 1

    def balanced(self, attribute: str) -> float:
        """Returns the mean over the true values of the percentage right (balanced accuracy).

        Any guess without the video scores 100 / number of values.
        """
        tallies = self.by_value.get(attribute, {}).values()
        return sum(tally.percent for tally in tallies) / max(1, len(tallies))

    def balanced_guess(self, attribute: str) -> float:
        """Returns the balanced percentage of any constant guess."""
        return 100.0 / max(1, len(self.by_value.get(attribute, {})))

    def majority(self, attribute: str) -> float:
        """Returns the percentage right of always saying the most frequent value."""
        counts = self.values.get(attribute, Counter())
        return 100.0 * max(counts.values(), default=0) / max(1, counts.total())


@dataclass(slots=True)
class Agreement:
    """Counts of equal greedy tokens, for content words and for template words."""

    content: Tally = field(default_factory=Tally)
    template: Tally = field(default_factory=Tally)

    def add_answer(
        self, said: IntArray, reference: Sequence[int], is_content: Sequence[bool]
    ) -> None:
        """Compare token by token; all arguments have an entry per token, end token included."""
        for own, other, content in zip(said.tolist(), reference, is_content, strict=True):
            (self.content if content else self.template).add_case(own == other)

    def summary(self) -> dict[str, float | int]:
        """Returns percentages of equal tokens: of all, of content words, of template words."""
        right = self.content.right + self.template.right
        total = self.content.total + self.template.total
        return {
            "tokens": total,
            "all": round(100.0 * right / max(1, total), 2),
            "content": round(self.content.percent, 2),
            "template": round(self.template.percent, 2),
            "content_share": round(100.0 * self.content.total / max(1, total), 2),
        }


def content_mask(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[bool]:
    """Returns for each token whether it is in a content word (see texts.content_spans)."""
    return content_pieces([str(tokenizer.decode([token])) for token in ids])


def content_pieces(pieces: Sequence[str]) -> list[bool]:
    """Returns ``content_mask`` of tokens given as text."""
    spans = texts.content_spans("".join(pieces))
    mask, start = [], 0
    for piece in pieces:
        letters = start + len(piece) - len(piece.lstrip())
        end = start + len(piece)
        mask.append(any(left < end and letters < right for left, right in spans) and letters < end)
        start = end
    return mask
