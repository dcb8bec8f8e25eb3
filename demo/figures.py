"""Scoring: statements against facts, and agreement of tokens, content and template apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from demo import texts
from demo.batches import IntArray
from demo.texts import Statement

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ATTRIBUTES = (
    "count",
    "position",
    "colour",
    "shape",
    "direction",
    "event",
    "size",
    "new_colour",
    "time",
)


@dataclass(slots=True)
class Tally:
    """Rights out of a total."""

    right: int = 0
    total: int = 0

    def add(self, is_right: bool) -> None:
        self.right += is_right
        self.total += 1

    @property
    def percent(self) -> float:
        """Percentage right; 0 when empty."""
        return 100.0 * self.right / max(1, self.total)


@dataclass(slots=True)
class Score:
    """Statements judged, an attribute at a time; `values` count what is true."""

    strict: dict[str, Tally] = field(default_factory=dict)
    placed: dict[str, Tally] = field(default_factory=dict)
    by_value: dict[str, dict[str, Tally]] = field(default_factory=dict)
    recall: Tally = field(default_factory=Tally)
    values: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, said: Sequence[Statement], true: Sequence[Statement]) -> None:
        """Judge what was said of one clip.

        `strict` counts every statement said; one about a place where nothing is, is wrong. `placed`
        counts only statements about places where there is an object, `by_value` these for each
        true value apart. `recall` is the share of facts that were said.
        """
        known = {(fact.cell, fact.attribute): fact.value for fact in true}
        occupied = {fact.cell for fact in true}
        for statement in said:
            value = known.get((statement.cell, statement.attribute))
            self.strict.setdefault(statement.attribute, Tally()).add(value == statement.value)
            if statement.cell in occupied and value is not None:
                is_right = value == statement.value
                self.placed.setdefault(statement.attribute, Tally()).add(is_right)
                values = self.by_value.setdefault(statement.attribute, {})
                values.setdefault(value, Tally()).add(is_right)
        mentioned = set(said)
        for fact in true:
            self.recall.add(fact in mentioned)
            self.values.setdefault(fact.attribute, Counter())[fact.value] += 1

    def balanced(self, attribute: str) -> float:
        """Percentage right with every true value weighing the same (the mean recall).

        What is said without looking scores 100 / number of values here, whatever is said and
        however often; so does the majority guess.
        """
        tallies = self.by_value.get(attribute, {}).values()
        return sum(tally.percent for tally in tallies) / max(1, len(tallies))

    def balanced_guess(self, attribute: str) -> float:
        """The same of always saying the most frequent value, or any other."""
        return 100.0 / max(1, len(self.by_value.get(attribute, {})))

    def majority(self, attribute: str) -> float:
        """Percentage right of always saying the most frequent value."""
        counts = self.values.get(attribute, Counter())
        return 100.0 * max(counts.values(), default=0) / max(1, counts.total())


@dataclass(slots=True)
class Agreement:
    """Equal greedy tokens, content and template apart."""

    content: Tally = field(default_factory=Tally)
    template: Tally = field(default_factory=Tally)

    def add(self, said: IntArray, reference: Sequence[int], is_content: Sequence[bool]) -> None:
        """Compare token by token; all three have one entry a token, the end token included."""
        for own, other, content in zip(said.tolist(), reference, is_content, strict=True):
            (self.content if content else self.template).add(own == other)

    def summary(self) -> dict[str, float | int]:
        """Percentages of equal tokens: of all, of content words, of template."""
        right, total = (
            self.content.right + self.template.right,
            self.content.total + self.template.total,
        )
        return {
            "tokens": total,
            "all": round(100.0 * right / max(1, total), 2),
            "content": round(self.content.percent, 2),
            "template": round(self.template.percent, 2),
            "content_share": round(100.0 * self.content.total / max(1, total), 2),
        }


def content_mask(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[bool]:
    """Which tokens of an answer belong to words that carry content (see texts.content_spans)."""
    return content_pieces([str(tokenizer.decode([token])) for token in ids])


def content_pieces(pieces: Sequence[str]) -> list[bool]:
    """``content_mask`` of tokens given by their text."""
    spans = texts.content_spans("".join(pieces))
    mask, start = [], 0
    for piece in pieces:
        letters = start + len(piece) - len(piece.lstrip())
        end = start + len(piece)
        mask.append(any(left < end and letters < right for left, right in spans) and letters < end)
        start = end
    return mask
