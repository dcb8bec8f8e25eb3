"""What is asked about which videos: the synthetic world, or a file of questions.

Both give each question in both prompt orders. The world's held-out clips have 336 x 336 pixels (a
grid of 12 x 12) and 14 or 16 frames, so 1,008 or 1,152 visual tokens, and at least five objects;
training uses other seeds. The question asks for a detailed description.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from demo.figures import content_pieces
from demo.world import clips as demo_clips
from demo.world import texts
from hippo.errors import InvalidRequestError
from hippo.lab.benchmark.video_questions import VideoQuestion, read_questions

SEED = 2  # separates these clips from the other benchmarks'
CONFIRM_SEED = 3  # clips on which no default was chosen
_MIN_OBJECTS = 5
_NUM_CLIPS = 200
_ORDERS = ("video-first", "question-first")


@dataclass(frozen=True, slots=True)
class Sample:
    """One question about one clip."""

    name: str
    kind: str
    question: str
    answer: str  # what the target probably says, to save time; may be empty
    is_video_first: bool


@dataclass(frozen=True, slots=True)
class SampleClip:
    """A video and the questions about it; the name is unique and serves for files."""

    name: str
    samples: tuple[Sample, ...]
    read_video: Callable[[], bytes]


class SampleSource(Protocol):
    """Where clips and questions come from; ``name`` differs for different ones."""

    name: str

    def clips(self, most: int | None) -> list[SampleClip]:
        """Returns the first clips, the same each time; None: the source's default number."""

    def content_mask(self, pieces: Sequence[str]) -> list[bool] | None:
        """Returns which pieces of an answer only the video determines; None: it is not known."""


class HeldOutWorld:
    """The held-out clips of one seed of the bundled pair's world."""

    def __init__(self, seed: int = SEED) -> None:
        self._seed = seed
        self.name = f"world-{seed}"

    def clips(self, most: int | None) -> list[SampleClip]:
        """See SampleSource; 200 clips by default."""
        return [self._clip(index) for index in range(most or _NUM_CLIPS)]

    def content_mask(self, pieces: Sequence[str]) -> list[bool] | None:
        """See SampleSource; the end token is no content."""
        return [*content_pieces(pieces[:-1]), False]

    def _clip(self, index: int) -> SampleClip:
        clip = demo_clips.held_out("long", index, seed=self._seed, min_objects=_MIN_OBJECTS)
        rng = np.random.default_rng((demo_clips.HELD_OUT, self._seed, 7, index))
        asked = texts.descriptions(clip.scene, rng)[0]
        samples = _both_orders(
            f"{clip.name}/{asked.kind}", asked.kind, asked.question, asked.answer
        )
        return SampleClip(clip.name, samples, partial(_encoded, clip))


class QuestionsFile:
    """The questions of a file in the form of ``hippo bench --questions``, a clip for each video.

    Raises InvalidRequestError for a line that is no question about a file on this machine.
    """

    def __init__(self, path: Path, videos: str | None = None) -> None:
        self._by_video: dict[Path, list[VideoQuestion]] = {}
        digest = hashlib.sha256()
        for question in read_questions(path, videos):
            video = Path(question.video)
            if not video.is_file():
                raise InvalidRequestError(
                    f"{path}, question {question.id!r}: {question.video} is not a file on this "
                    "machine, and bench.pruning downloads no videos"
                )
            self._by_video.setdefault(video, []).append(question)
            digest.update(f"{question} {video.stat().st_size}".encode())
        self.name = f"questions-{digest.hexdigest()[:12]}"

    def clips(self, most: int | None) -> list[SampleClip]:
        """See SampleSource; all videos by default."""
        found = []
        for number, (video, questions) in enumerate(list(self._by_video.items())[:most]):
            name = f"{number:04d}-{video.stem}"
            samples = tuple(
                sample
                for each in questions
                for sample in _both_orders(f"{name}/{each.id}", each.category, each.prompt)
            )
            found.append(SampleClip(name, samples, video.read_bytes))
        return found

    def content_mask(self, pieces: Sequence[str]) -> list[bool] | None:
        """See SampleSource."""
        return None


def _both_orders(name: str, kind: str, question: str, answer: str = "") -> tuple[Sample, ...]:
    return tuple(
        Sample(f"{name}/{order}", kind, question, answer, order == _ORDERS[0]) for order in _ORDERS
    )


def _encoded(clip: demo_clips.Clip) -> bytes:
    buffer = io.BytesIO()
    demo_clips.write_mp4(clip.scene, buffer, frame_rate=clip.frame_rate)
    return buffer.getvalue()
