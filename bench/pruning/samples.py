"""The held-out clips and questions: a detailed description, in both prompt orders.

Clips have 336 x 336 pixels (a grid of 12 x 12) and 14 or 16 frames, so 1,008 or 1,152 visual
tokens, and at least five objects; training uses other seeds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from demo import clips, texts
from demo.clips import Clip

SEED = 2  # separates these clips from the other benchmarks'
CONFIRM_SEED = 3  # clips on which no default was chosen
MIN_OBJECTS = 5


@dataclass(frozen=True, slots=True)
class Sample:
    """One question about one clip."""

    name: str
    kind: str
    question: str
    answer: str  # the true one; the target's may differ
    is_video_first: bool


def held_out_clips(num_clips: int, seed: int = SEED) -> Iterator[Clip]:
    """Yields the clips, the same each time for one seed."""
    for index in range(num_clips):
        yield clips.held_out("long", index, seed=seed, min_objects=MIN_OBJECTS)


def samples_of(clip: Clip, index: int, seed: int = SEED) -> list[Sample]:
    """Returns a detailed description with the video before the question, and one after it."""
    rng = np.random.default_rng((clips.HELD_OUT, seed, 7, index))
    detailed = texts.descriptions(clip.scene, rng)[0]
    return [
        Sample(
            name=f"{clip.name}/{detailed.kind}/{order}",
            kind=detailed.kind,
            question=detailed.question,
            answer=detailed.answer,
            is_video_first=order == "video-first",
        )
        for order in ("video-first", "question-first")
    ]
