"""Puts media into a rendered prompt: a placeholder becomes text and runs of visual tokens.

    rendered   user: <|vision_start|><|video_pad|><|vision_end|>What happens?
    pieces                           6                                             Qwen2.5-VL
               "<0.2 seconds><|vision_start|>" 3 "<|vision_end|><1.2 seconds>" ... Qwen3-VL

A run is tokenized as one token, which is then repeated, because tokenizing thousands of equal
tokens takes long.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from hippo.errors import InvalidRequestError
from hippo.types import MediaKind

# From a text to its ids, and the first and last character of each.
Encode = Callable[[str], tuple[Sequence[int], Sequence[tuple[int, int]]]]
VisualGrid = tuple[int, int, int]  # frames, rows, columns of one video's visual tokens


@dataclass(frozen=True, slots=True)
class MediaMark:
    """How a chat template and a tokenizer write the items of one kind."""

    placeholder: str  # what the template writes for an item
    token: str  # a visual token
    token_id: int


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """What one video or image becomes in a prompt, and what the vision tower takes of it.

    ``pieces`` are literal texts and numbers of consecutive visual tokens. ``grid`` is
    VisualItem.grid; ``visual_grid`` is the grid of a video's prunable tokens. The last
    ``num_separators`` visual tokens belong to no grid and are never pruned.
    """

    kind: MediaKind
    pieces: tuple[str | int, ...]
    pixels: torch.Tensor
    grid: tuple[int, ...]
    visual_grid: VisualGrid | None = None
    num_separators: int = 0

    @property
    def num_tokens(self) -> int:
        """Number of visual tokens, separators included."""
        return sum(piece for piece in self.pieces if isinstance(piece, int))


@dataclass(frozen=True, slots=True, eq=False)
class LaidOutText:
    """A tokenized prompt with its media."""

    input_ids: torch.Tensor  # int64 [length]
    places: Sequence[torch.Tensor]  # int64: each layout's visual tokens in ``input_ids``
    _counts: torch.Tensor  # int64: how often each encoded token is repeated
    _offsets: Sequence[tuple[int, int]]  # characters of each encoded token in the expanded text
    _is_run: Sequence[bool]
    _shifts: Sequence[tuple[int, int]]  # from this rendered character on: characters added before

    def rows_of(self, spans: Iterable[tuple[int, int]]) -> torch.Tensor:
        """Returns the indices in ``input_ids`` (int64, ascending) of the tokens of these spans of
        characters of the rendered text, without visual tokens."""
        moved = [(self._moved(start), self._moved(end)) for start, end in spans]
        is_inside = [
            not is_run and any(start < last and end > first for first, last in moved)
            for (start, end), is_run in zip(self._offsets, self._is_run, strict=True)
        ]
        return torch.tensor(is_inside).repeat_interleave(self._counts).nonzero()[:, 0]

    def _moved(self, character: int) -> int:
        shift = 0
        for start, added in self._shifts:
            if start <= character:
                shift = added
        return character + shift


def in_written_order(
    rendered: str, layouts: Sequence[Layout], marks: Mapping[MediaKind, MediaMark]
) -> list[Layout]:
    """Returns the layouts in the order of their placeholders; a chat template may put images before
    videos, but keeps the order of each kind.

    Raises InvalidRequestError if the template has not written a placeholder for each item.
    """
    kinds = {mark.placeholder: kind for kind, mark in marks.items()}
    written = [kinds[match.group()] for match in _placeholders(marks).finditer(rendered)]
    if sorted(kind.value for kind in written) != sorted(each.kind.value for each in layouts):
        raise InvalidRequestError(
            f"the model's chat template writes {len(written)} media items for the {len(layouts)} "
            "of these messages: it does not take messages of this form",
            param="messages",
        )
    waiting = {kind: iter([each for each in layouts if each.kind is kind]) for kind in marks}
    return [next(waiting[kind]) for kind in written]


def lay_out_text(
    encode: Encode,
    rendered: str,
    layouts: Sequence[Layout],
    marks: Mapping[MediaKind, MediaMark],
) -> LaidOutText:
    """Replaces the placeholders of ``rendered`` by the pieces of ``layouts``, which are
    in_written_order, and tokenizes.

    Raises InvalidRequestError if a text contains a visual token.
    """
    text, shifts = _expand(rendered, layouts, marks)
    ids, offsets = encode(text)
    encoded = torch.tensor(ids, dtype=torch.int64)
    is_run = torch.isin(encoded, torch.tensor([mark.token_id for mark in marks.values()]))
    runs = [piece for each in layouts for piece in each.pieces if isinstance(piece, int)]
    if int(is_run.sum()) != len(runs):
        tokens = " or ".join(sorted({mark.token for mark in marks.values()}))
        raise InvalidRequestError(f"text may not contain {tokens}", param="messages")
    counts = torch.ones_like(encoded)
    counts[is_run] = torch.tensor(runs, dtype=torch.int64)
    visual = is_run.repeat_interleave(counts).nonzero()[:, 0]
    return LaidOutText(
        input_ids=encoded.repeat_interleave(counts),
        places=torch.split(visual, [each.num_tokens for each in layouts]),
        _counts=counts,
        _offsets=offsets,
        _is_run=is_run.tolist(),
        _shifts=shifts,
    )


def _placeholders(marks: Mapping[MediaKind, MediaMark]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(mark.placeholder) for mark in marks.values()))


def _expand(
    rendered: str, layouts: Sequence[Layout], marks: Mapping[MediaKind, MediaMark]
) -> tuple[str, list[tuple[int, int]]]:
    """Returns the text with one token for each run, and LaidOutText._shifts."""
    parts: list[str] = []
    shifts: list[tuple[int, int]] = []
    cursor = added = 0
    matches = _placeholders(marks).finditer(rendered)
    for match, layout in zip(matches, layouts, strict=True):
        inserted = "".join(_written(layout.pieces, marks[layout.kind].token))
        parts += [rendered[cursor : match.start()], inserted]
        cursor = match.end()
        added += len(inserted) - len(match.group())
        shifts.append((cursor, added))
    return "".join([*parts, rendered[cursor:]]), shifts


def _written(pieces: Sequence[str | int], token: str) -> Iterator[str]:
    """Writes every run as one token; two runs are never adjacent."""
    for piece, following in itertools.zip_longest(pieces, pieces[1:]):
        assert isinstance(piece, str) or isinstance(following, str) or following is None
        yield piece if isinstance(piece, str) else token
