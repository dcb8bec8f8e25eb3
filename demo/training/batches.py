"""Training batches for the language models: clips, conversations about them, positions and labels.

All clips of a batch have one size. A batch is a pure function of its recipe, seed and index.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from demo.training.models import SpecialIds
from demo.world import pixels, texts
from demo.world import scenes as world
from demo.world.sizes import Grid, Size
from demo.world.texts import Exchange

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORE = -100
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Recipe:
    """The composition of the batches of a stage."""

    name: str
    sizes: tuple[Size, ...]
    tokens: int  # approximate sequence tokens per batch
    is_still: bool = False  # nothing changes, for single frame pairs
    short_share: float = 0.3  # batches of short questions only
    drop_share: float = 0.0  # batches with visual tokens dropped
    blind_share: float = 0.0  # batches with no visual tokens
    talk_share: float = 0.0  # conversations without a clip
    stream: int = 3  # separates the random streams of stages


@dataclass(frozen=True, slots=True)
class Sequences:
    """Conversations as right-padded rows with equal numbers of visual tokens.

    labels[b, i] is the id that should follow position i, or IGNORE.
    """

    ids: IntArray  # [batch, length]
    labels: IntArray  # [batch, length]
    positions: IntArray  # [3, batch, length]
    lengths: IntArray  # [batch]


@dataclass(frozen=True, slots=True)
class Batch:
    """Clips with conversations about them; `select` has the indices that the model sees."""

    size: Size
    frames: npt.NDArray[np.uint8]  # [rows with a clip, num_frames, height, width, 3]
    sequences: Sequences
    select: IntArray | None  # [batch, kept length], or None for all


class Encoder:
    """Encodes conversations to the same ids as the chat template."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", ids: SpecialIds) -> None:
        self._backend: Any = tokenizer.backend_tokenizer
        self._cache: dict[str, list[int]] = {}
        self.special = ids
        start: Any = tokenizer.convert_tokens_to_ids("<|im_start|>")
        self.im_start = int(start)

    def text_ids(self, text: str) -> list[int]:
        """Returns the ids of a text."""
        if text not in self._cache:
            if len(self._cache) > 20_000:
                self._cache.clear()
            self._cache[text] = self._backend.encode(text, add_special_tokens=False).ids
        return self._cache[text]

    def clip_ids(self, grid: Grid) -> list[int]:
        """Returns the ids of a clip."""
        special = self.special
        pads = [special.video_pad] * math.prod(grid)
        return [special.vision_start, *pads, special.vision_end]

    def conversation(
        self,
        exchanges: Sequence[Exchange],
        *,
        grid: Grid | None,
        is_video_first: bool = True,
        system: str | None = None,
        open_end: bool = False,
    ) -> tuple[list[int], list[bool]]:
        """Returns ids, and whether each is the assistant's; `open_end` omits the last answer.

        grid: the merged tokens along time, height and width of the clip, if there is one.
        """
        special = self.special
        ids: list[int] = []
        said: list[bool] = []

        def add(piece: list[int], is_answer: bool = False) -> None:
            ids.extend(piece)
            said.extend([is_answer] * len(piece))

        newline = self.text_ids("\n")
        if system is not None:
            add([self.im_start, *self.text_ids(f"system\n{system}"), special.im_end, *newline])
        for turn, exchange in enumerate(exchanges):
            clip = self.clip_ids(grid) if turn == 0 and grid is not None else []
            if clip and is_video_first:
                body = [*self.text_ids("user\n"), *clip, *self.text_ids(exchange.question)]
            else:
                body = [*self.text_ids(f"user\n{exchange.question}"), *clip]
            add([self.im_start, *body, special.im_end, *newline])
            add([self.im_start, *self.text_ids("assistant\n")])
            if open_end and turn == len(exchanges) - 1:
                break
            add([*self.text_ids(exchange.answer), special.im_end], is_answer=True)
            add(newline)
        return ids, said


def answered_rows(
    encoder: Encoder,
    questions: Sequence[str],
    answers: Sequence[list[int]],
    *,
    grid: Grid,
    is_video_first: bool,
) -> list[tuple[list[int], list[bool]]]:
    """Returns a conversation for each question with the ids of its answer, for ``pack``."""
    end, rows = encoder.special.im_end, []
    for question, answer in zip(questions, answers, strict=True):
        prompt, said = encoder.conversation(
            [Exchange("", question, "")], grid=grid, is_video_first=is_video_first, open_end=True
        )
        rows.append(([*prompt, *answer, end], [*said, *[True] * (len(answer) + 1)]))
    return rows


def positions_of(ids: IntArray, grid: Grid, video_pad: int, interval: int = 2) -> IntArray:
    """Returns the M-RoPE positions [3, length] of a row with at most one clip."""
    time, rows, cols = grid
    places = np.flatnonzero(ids == video_pad)
    out = np.broadcast_to(np.arange(len(ids), dtype=np.int64), (3, len(ids))).copy()
    if places.size:
        start, end = int(places[0]), int(places[-1]) + 1
        grids = np.meshgrid(
            np.arange(time) * interval, np.arange(rows), np.arange(cols), indexing="ij"
        )
        out[:, start:end] = start + np.stack(grids).reshape(3, -1)
        out[:, end:] = start + max(rows, cols) + np.arange(len(ids) - end)
    return out


def pack(
    rows: Sequence[tuple[list[int], list[bool]]], grid: Grid, special: SpecialIds
) -> Sequences:
    """Pads the conversations on the right and adds labels and positions."""
    length = -(-max(len(ids) for ids, _ in rows) // 16) * 16
    ids = np.full((len(rows), length), special.end_of_text, np.int64)
    labels = np.full((len(rows), length), IGNORE, np.int64)
    positions = np.zeros((3, len(rows), length), np.int64)
    for row, (tokens, said) in enumerate(rows):
        values = np.array(tokens, np.int64)
        ids[row, : len(values)] = values
        labels[row, : len(values) - 1] = np.where(said[1:], values[1:], IGNORE)
        positions[:, row, : len(values)] = positions_of(values, grid, special.video_pad)
    return Sequences(
        ids, labels, positions, np.array([len(tokens) for tokens, _ in rows], np.int64)
    )


def clip_times(size: Size, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Returns the times of two frames per second, with the small offset of a real file."""
    return np.asarray(np.arange(size.num_frames) * 0.5 + rng.uniform(0, 0.06), np.float64)


def sample_scene(recipe: Recipe, size: Size, rng: np.random.Generator) -> world.Scene:
    """Returns a scene for a clip of `size`; stills are 4 s scenes without motion or events."""
    duration_s = 4.0 if recipe.is_still else size.num_frames / 2
    return world.sample_scene(
        rng,
        height=size.height,
        width=size.width,
        duration_s=duration_s,
        max_objects=size.max_objects,
        is_still=recipe.is_still,
    )


def sample_batch(recipe: Recipe, encoder: Encoder, seed: int, index: int) -> Batch:
    """Returns the batch of an index, a pure function of the arguments."""
    rng = np.random.default_rng((seed, recipe.stream, index))
    shares = np.array([size.share for size in recipe.sizes])
    size = recipe.sizes[int(rng.choice(len(shares), p=shares / shares.sum()))]
    plan = (
        "short"
        if rng.random() < recipe.short_share
        else str(rng.choice(["detailed", "detailed", "mixed"]))
    )
    kept = size.num_visual
    draw = rng.random()
    if draw < recipe.blind_share:
        kept = 0
    elif draw < recipe.blind_share + recipe.drop_share:
        kept = max(1, round(size.num_visual * float(1 - rng.uniform(0.0, 0.95))))
    count = max(2, recipe.tokens // (kept + 150))
    rows: list[tuple[list[int], list[bool]]] = []
    clips: list[npt.NDArray[np.uint8]] = []
    for _ in range(count):
        if (
            kept == size.num_visual
            and clips
            and recipe.talk_share
            and rng.random() < recipe.talk_share
        ):
            talk = texts.SMALL_TALK[int(rng.integers(len(texts.SMALL_TALK)))]
            rows.append(encoder.conversation([talk], grid=None))
            continue
        scene = sample_scene(recipe, size, rng)
        clips.append(pixels.augment(world.render(scene, clip_times(size, rng)), rng))
        rows.append(
            encoder.conversation(
                _choose_exchanges(plan, scene, rng),
                grid=size.grid,
                is_video_first=bool(rng.random() < 0.6),
                system=str(rng.choice(SYSTEMS)) if rng.random() < 0.15 else None,
            )
        )
    sequences = pack(rows, size.grid, encoder.special)
    select = (
        None
        if kept == size.num_visual
        else keep_some(sequences, kept, encoder.special.video_pad, rng)
    )
    return Batch(size, np.stack(clips), sequences, select)


SYSTEMS = ("You are a helpful assistant.", "Answer questions about the video.", "Be precise.")


def _choose_exchanges(plan: str, scene: world.Scene, rng: np.random.Generator) -> list[Exchange]:
    described = texts.descriptions(scene, rng)
    if rng.random() < 0.02:
        return [
            *texts.short_questions(scene, rng, 3),
            texts.SMALL_TALK[int(rng.integers(len(texts.SMALL_TALK)))],
        ]
    if plan == "short":
        return texts.short_questions(scene, rng, 6)
    if plan == "detailed":
        return [described[0], *texts.short_questions(scene, rng, int(rng.integers(0, 2)))]
    if rng.random() < 0.5:
        return [*texts.short_questions(scene, rng, 2), described[1]]
    return [described[2], described[1]]


def keep_some(
    sequences: Sequences, kept: int, video_pad: int, rng: np.random.Generator
) -> IntArray:
    """Returns the indices [batch, length - dropped] of all text and `kept` visual tokens per row,
    drawn uniformly at random."""
    chosen = []
    for ids in sequences.ids:
        is_visual = ids == video_pad
        visual = np.flatnonzero(is_visual)
        keep = rng.permutation(visual)[:kept]
        chosen.append(np.sort(np.concatenate([np.flatnonzero(~is_visual), keep])))
    return np.stack(chosen)
