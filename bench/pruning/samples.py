"""What is asked about which held-out clip: descriptions and questions, in both prompt orders.

Clips have 336 pixels a side (a grid of 12 x 12) and 14 or 16 frames, so 1,008 or 1,152 visual
tokens, and at least five objects; no training stream has their seeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from demo import clips, texts
from demo.clips import Clip
from demo.texts import Exchange
from demo.world import Scene, SceneObject

SEED = 2  # separates these clips from the other benchmarks'
CONFIRM_SEED = 3  # clips on which nothing was chosen
TOKEN_PIXELS = 28
MIN_OBJECTS = 5
DESCRIPTION_KINDS = ("detailed", "report", "list")
QUESTION_KINDS = ("count", "what", "colour", "direction", "event", "position", "order")
_QUESTIONS_A_CLIP = 4


@dataclass(frozen=True, slots=True)
class Sample:
    """One question about one clip; ``subject_cells`` are the places that it is about."""

    name: str
    kind: str
    question: str
    answer: str  # the world's own, which the target need not give
    is_video_first: bool
    subject_cells: tuple[int, ...]


def held_out_clips(num_clips: int, seed: int = SEED) -> Iterator[Clip]:
    """The clips, the same ones each time for one seed."""
    for index in range(num_clips):
        yield clips.held_out("long", index, seed=seed, min_objects=MIN_OBJECTS)


def samples_of(clip: Clip, index: int, seed: int = SEED) -> list[Sample]:
    """The detailed description in both orders, one shorter description and four questions."""
    rng = np.random.default_rng((clips.HELD_OUT, seed, 7, index))
    detailed, report, listing = texts.descriptions(clip.scene, rng)
    is_first = index % 2 == 0
    asked = [(detailed, True), (detailed, False)]
    asked.append((report if index % 4 < 2 else listing, is_first))
    for place, exchange in enumerate(texts.short_questions(clip.scene, rng, _QUESTIONS_A_CLIP)):
        asked.append((exchange, is_first == (place % 2 == 0)))
    return [_sample(clip, exchange, is_video_first) for exchange, is_video_first in asked]


def _sample(clip: Clip, exchange: Exchange, is_video_first: bool) -> Sample:
    order = "video-first" if is_video_first else "question-first"
    return Sample(
        name=f"{clip.name}/{exchange.kind}/{order}",
        kind=exchange.kind,
        question=exchange.question,
        answer=exchange.answer,
        is_video_first=is_video_first,
        subject_cells=_subject_cells(exchange),
    )


def _subject_cells(exchange: Exchange) -> tuple[int, ...]:
    """The cells that a short question and its answer name; none for a description."""
    if exchange.kind in DESCRIPTION_KINDS:
        return ()
    text = f"{exchange.question} {exchange.answer}"
    return tuple(cell for cell, name in enumerate(texts.CELLS) if f"the {name}" in text)


def is_at_border(item: SceneObject, scene: Scene) -> bool:
    """Whether the object's disc touches the outer ring of tokens at some time of the clip."""
    times = np.linspace(0.0, scene.duration_s, 9)
    x, y = item.centre_at(times, scene.duration_s).T
    reach = TOKEN_PIXELS + item.radius
    return bool(
        min(x.min(), y.min()) < reach
        or x.max() > scene.width - reach
        or y.max() > scene.height - reach
    )


def places_of(scene: Scene) -> dict[int, str]:
    """For each cell that holds an object, "border" or "centre"."""
    return {
        item.cell: "border" if is_at_border(item, scene) else "centre" for item in scene.objects
    }


def sentence_cells(pieces: Sequence[str]) -> list[int]:
    """For each token of a description, the cell that its sentence is about; -1 for none.

    Sentences about an object begin with its cell, and end with a full stop.
    """
    text = "".join(pieces)
    cells = np.full(len(text) + 1, -1)
    start = 0
    for end in [place for place, letter in enumerate(text) if letter == "."] + [len(text) - 1]:
        sentence = text[start : end + 1].lower().lstrip()
        for cell, name in enumerate(texts.CELLS):
            if sentence.startswith((f"at the {name}", f"{name}:")):
                cells[start : end + 1] = cell
        start = end + 1
    places = np.cumsum([0, *(len(piece) for piece in pieces)])[:-1]
    # A piece may begin with the blank after the sentence before: its last letter decides.
    lasts = [place + max(len(piece), 1) - 1 for place, piece in zip(places, pieces, strict=True)]
    return [int(cells[last]) for last in lasts]
