"""Scores: statements against facts, and agreement of content tokens and of template tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from demo.world import texts
from demo.world.texts import Statement

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
    """Counts of right statements by attribute.

    ``strict`` counts every statement; one about an empty place is wrong. ``placed`` counts only
    statements about places with an object. ``recall`` is the share of facts that were said.
    """

    strict: dict[str, Tally] = field(default_factory=lambda: {name: Tally() for name in ATTRIBUTES})
    placed: dict[str, Tally] = field(default_factory=lambda: {name: Tally() for name in ATTRIBUTES})
    recall: Tally = field(default_factory=Tally)

    def add_clip(self, said: Sequence[Statement], true: Sequence[Statement]) -> None:
        """Judges the statements about one clip."""
        known = {(fact.cell, fact.attribute): fact.value for fact in true}
        for statement in said:
            if statement.attribute not in ATTRIBUTES:  # about the background
                continue
            value = known.get((statement.cell, statement.attribute))
            is_right = value == statement.value
            self.strict[statement.attribute].add_case(is_right)
            if value is not None:
                self.placed[statement.attribute].add_case(is_right)
        mentioned = set(said)
        for fact in true:
            self.recall.add_case(fact in mentioned)


def content_pieces(pieces: Sequence[str]) -> list[bool]:
    """Returns for each token, given as text, whether it is in a content word (see
    texts.content_spans)."""
    spans = texts.content_spans("".join(pieces))
    mask, start = [], 0
    for piece in pieces:
        letters = start + len(piece) - len(piece.lstrip())
        end = start + len(piece)
        mask.append(any(left < end and letters < right for left, right in spans) and letters < end)
        start = end
    return mask
