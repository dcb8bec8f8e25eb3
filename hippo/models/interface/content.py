"""Compares prompts and slots by content, for prefix reuse and the vision cache.

Keys and values of a row depend on that row, its position and all rows before it. Two sequences
therefore share exactly the rows of their longest common prefix. ``CachedRows`` describes the rows:

    row          0   1   2   3   4   5   6   7   8        "<video> What happens?", pruned
    token id    61  70  70  70  70  12  85  33   9
    item         -   0   0   0   0   -   -   -   -        digests[0]: of the video's pixels
    offset       -   0   3   4   9   -   -   -   -        index of the token within its item
    position     0   1   1   2   4   6   7   8   9        on each axis
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hippo.models.interface.base import Prompt
from hippo.types import MediaKind

_ITEM = 1  # line of CachedRows.table


def visual_digest(kind: MediaKind, pixels: torch.Tensor, parameters: tuple[object, ...]) -> bytes:
    """Returns a SHA-256 of everything that determines the tower's output for one video or image.

    ``pixels`` (on the CPU, any shape) are the processor's output for the item; ``parameters`` are
    further plain values, such as the grid. Hashes 2 GB/s and releases the interpreter's lock.
    """
    header = (kind.value, str(pixels.dtype), tuple(pixels.shape), parameters)
    digest = hashlib.sha256(repr(header).encode() + b"\0")
    digest.update(pixels.contiguous().view(-1).numpy().data)
    return digest.digest()


@dataclass(frozen=True, slots=True, eq=False)
class CachedRows:
    """The content of a slot's rows, from the first one on; a plain value."""

    salt: str  # rows with different salts are never equal
    table: torch.Tensor  # int64 [3 + num_axes, num_rows]: token id, item, offset, positions
    digests: tuple[bytes, ...]  # one per item, in the order of the prompt

    def __len__(self) -> int:
        return int(self.table.shape[1])

    def first(self, num_rows: int) -> "CachedRows":
        """Returns the first ``num_rows`` rows."""
        return dataclasses.replace(self, table=self.table[:, :num_rows])

    def at(self, places: torch.Tensor | None) -> "CachedRows":
        """Returns the rows at ``places`` (int64, ascending; None: all rows)."""
        return self if places is None else dataclasses.replace(self, table=self.table[:, places])

    def moved(self, positions: torch.Tensor) -> "CachedRows":
        """Returns the rows at other positions (int64 ``[num_axes, num_rows]``)."""
        return dataclasses.replace(self, table=torch.cat((self.table[:3], positions)))

    def followed_by(self, token_ids: Sequence[int], position: int) -> "CachedRows":
        """Returns the rows followed by text, whose first token has ``position`` on every axis."""
        ids = torch.tensor(token_ids, dtype=torch.int64)
        positions = torch.arange(position, position + ids.shape[0])
        no_item = torch.full_like(ids, -1)
        more = [ids, no_item, no_item, *[positions] * (self.table.shape[0] - 3)]
        return dataclasses.replace(self, table=torch.cat((self.table, torch.stack(more)), 1))

    def common_length(self, other: "CachedRows") -> int:
        """Returns how many rows from the first one on have equal keys and values in both."""
        num_rows = min(len(self), len(other))
        if num_rows == 0 or self.salt != other.salt:
            return 0
        for item, (mine, theirs) in enumerate(zip(self.digests, other.digests, strict=False)):
            if mine != theirs:
                num_rows = _first_true(self.table[_ITEM, :num_rows] == item)
        differs = (self.table[:, :num_rows] != other.table[:, :num_rows]).any(0)
        return _first_true(differs)


def no_rows() -> CachedRows:
    """Returns the rows of an empty slot."""
    return CachedRows("", torch.empty(0, 0, dtype=torch.int64), ())


def cached_rows(prompt: Prompt, salt: str = "") -> CachedRows:
    """Returns the rows that a prefill of the whole prompt caches."""
    item = torch.full_like(prompt.input_ids, -1)
    offset = item.clone()
    items = sorted(prompt.items, key=lambda one: int(one.places[0]))
    for index, one in enumerate(items):
        item[one.places] = index
        offset[one.places] = torch.arange(one.places.shape[0])
    assert (item[prompt.visual_indices] >= 0).all(), "a visual token without its content"
    table = torch.cat((torch.stack((prompt.input_ids, item, offset)), prompt.positions))
    return CachedRows(salt, table, tuple(one.digest for one in items))


def salted(prompt: Prompt, salt: str) -> Prompt:
    """Returns the prompt with digests that are equal only for prompts of the same salt."""
    if not salt:
        return prompt
    items = tuple(
        dataclasses.replace(item, digest=hashlib.sha256(salt.encode() + item.digest).digest())
        for item in prompt.items
    )
    return dataclasses.replace(prompt, items=items)


def has_visual_from(prompt: Prompt, place: int) -> bool:
    """Whether there may be visual rows at index ``place`` or behind; the row behind an item may be
    a separator."""
    return any(int(item.places[-1]) + 1 >= place for item in prompt.items)


def cached_places(prompt: Prompt, kept: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the cached tokens' indices in ``input_ids`` (int64, on the CPU); None: all."""
    return None if kept is None else _is_cached(prompt, kept).nonzero()[:, 0]


def kept_ends(prompt: Prompt, kept: torch.Tensor | None) -> tuple[int, ...]:
    """Returns behind which numbers of cached rows a prompt has a beginning that later prompts may
    share: the media, and the question about them; without a question all but the last row, from
    which the answer begins."""
    ends = [int(item.places[-1]) + 1 for item in prompt.items]
    asked = (prompt.question_indices[-1:] + 1).tolist() or [prompt.length]
    ends = [max(ends, default=0), min(*asked, prompt.length - 1)]
    places = cached_places(prompt, kept)
    if places is not None:
        ends = torch.searchsorted(places, torch.tensor(ends)).tolist()
    return tuple(sorted({end for end in ends if end}))


def compacted(prompt: Prompt, kept: torch.Tensor) -> Prompt:
    """Returns the prompt with consecutive positions, on every axis, for text and kept tokens.

    Positions of dropped tokens are never read.
    """
    is_cached = _is_cached(prompt, kept)
    ranks = (is_cached.long().cumsum(0) - 1).clamp(min=0)
    positions = ranks.repeat(prompt.positions.shape[0], 1)
    return dataclasses.replace(prompt, positions=positions, next_position=int(is_cached.sum()))


def _is_cached(prompt: Prompt, kept: torch.Tensor) -> torch.Tensor:
    """Marks text and kept tokens: bool ``[length]``."""
    is_cached = torch.ones(prompt.length, dtype=torch.bool)
    is_cached[prompt.visual_indices] = False
    is_cached[prompt.visual_indices[kept.cpu()]] = True
    return is_cached


def _first_true(mask: torch.Tensor) -> int:
    """Returns the index of the first True, or the length."""
    places = mask.nonzero()
    return int(places[0, 0]) if places.shape[0] else int(mask.shape[0])
