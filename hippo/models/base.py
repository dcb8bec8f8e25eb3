"""What an engine needs of a model family: one small interface, plain values in and tensors out.

A slot is one sequence's stretch of the key-value cache. Prompt tokens fill it first (for the draft
only the kept ones), completion token ``i`` goes to cache index ``prompt_length + i``:

    slot   |-- cached prompt --|-- completion 0 .. i --|   free   |
                               ^ prompt_length          ^ the next forward overwrites from here

so a rollback is the start index of the next step; nothing is copied or cleared.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from hippo.types import ChatMessage, FramePlan, MediaKind, ModelInfo

Scope = Literal["visual", "all"]


@dataclass(frozen=True, slots=True)
class DecodedMedia:
    """Frames of one media item, after sampling, before the model's own resizing.

    ``frames`` is uint8 ``[num_frames, height, width, 3]`` (RGB); an image has one frame.
    ``frame_seconds`` are the frames' presentation times; ``sampled_fps`` is their mean rate.
    """

    kind: MediaKind
    frames: torch.Tensor
    frame_seconds: tuple[float, ...]
    sampled_fps: float


@dataclass(frozen=True, slots=True, eq=False)
class VisualItem:
    """One video or image of a prompt: the tokens that the vision tower gives for it.

    ``digest`` (hippo.models.content) is equal exactly for items of equal features.
    """

    digest: bytes
    places: torch.Tensor  # int64 [num_tokens], in ``input_ids``, ascending


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in the model's own terms, on the CPU.

    ``visual_indices`` are the places in ``input_ids`` of the prunable (video) tokens,
    ``question_indices`` those of the text that asks about them (hippo.models.question), empty
    without prunable tokens; ``extras`` holds the family's own tensors (pixels, grids).
    ``items`` are the videos, then the images, each in the order of the prompt; every prunable
    token belongs to one.
    """

    input_ids: torch.Tensor  # int64 [length]
    positions: torch.Tensor  # int64 [num_axes, length]
    next_position: int  # rotary position of completion token 0, on every axis
    visual_indices: torch.Tensor  # int64 [num_visual_tokens]
    visual_grids: tuple[tuple[int, int, int], ...]  # (frames, rows, columns) a video
    question_indices: torch.Tensor  # int64 [num_question_tokens], ascending
    prompt_hash: bytes  # SHA-256 of input_ids as little-endian uint32
    extras: dict[str, torch.Tensor] = field(default_factory=dict)
    items: tuple[VisualItem, ...] = ()

    @property
    def length(self) -> int:
        """Number of prompt tokens, visual ones included."""
        return int(self.input_ids.shape[0])


@dataclass(slots=True)
class AttentionTap:
    """Scores a prompt's visual tokens while its prefill runs; made for one prefill, which fills it.

    How much the question (``prompt.question_indices``) attends to each visual token in the first
    ``num_layers`` layers. ``scope`` says what a query's attention is shared out among: the visual
    tokens alone, or all that are cached.
    """

    num_layers: int
    scope: Scope = "visual"
    layer_scores: torch.Tensor | None = None  # float32 [num_layers, num_visual_tokens]
    score_ns: int = 0  # the device thread's time for the scores

    @property
    def scores(self) -> torch.Tensor | None:
        """Float32 ``[num_visual_tokens]`` on the device, the mean over layers; None before the
        prefill has run ``num_layers`` layers."""
        return None if self.layer_scores is None else self.layer_scores.mean(0)


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """Completion tokens of one sequence to feed: ``token_ids[k]`` has index ``start_index + k``."""

    slot: int
    start_index: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward over rows of several sequences, flattened in this order."""

    sequences: tuple[SequenceRows, ...]

    @property
    def num_rows(self) -> int:
        """Rows of the flattened forward."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)


class FeatureCache(Protocol):
    """Keeps the vision tower's output by content (device thread)."""

    def get(self, digest: bytes, /) -> torch.Tensor | None:
        """The features ``[num_tokens, hidden]`` of an item with this digest, not to be written."""

    def put(self, digest: bytes, features: torch.Tensor, /) -> None:
        """Keeps the features of an item for a while; nobody writes them any more."""


class VideoLanguageModel(Protocol):
    """A loaded checkpoint with its key-value cache. Only the device thread calls what says so."""

    @property
    def info(self) -> ModelInfo:
        """What is served."""

    @property
    def num_layers(self) -> int:
        """Decoder layers in all."""

    def prepare(
        self, messages: Sequence[ChatMessage], media: Sequence[DecodedMedia], frame_plan: FramePlan
    ) -> Prompt:
        """Chat template and processor: any thread, no device.

        Raises InvalidRequestError for messages that the template cannot take, ContextLengthError
        when the prompt alone exceeds the context.
        """

    def embed_visual(
        self, prompt: Prompt, cache: FeatureCache | None = None
    ) -> torch.Tensor | None:
        """Vision tower (device thread): ``[num_visual_tokens, hidden]``, None without media.

        Of the items that the ``cache`` has nothing is computed; the others are put there. The
        result is the same to the last bit, with or without.
        """

    def prefill(
        self,
        slot: int,
        prompt: Prompt,
        visual: torch.Tensor | None,
        kept: torch.Tensor | None,
        tap: AttentionTap | None = None,
        num_reused: int = 0,
    ) -> Generator[torch.Tensor | None]:
        """Fills the slot (device thread); yields None after each piece of work, then the logits.

        A piece is some layers over a chunk of the prompt, short enough for other sequences to be
        stepped in between.

        ``kept`` (int64 indices into ``prompt.visual_indices``; None: all) are the visual tokens
        that enter the cache, with their original positions. The last item is float32
        ``[num_token_ids]``, the logits of completion token 0. Closing the generator early leaves
        the slot unused.

        The first ``num_reused`` of the rows that are to be cached stand in the slot already, from
        an earlier prefill or forward of the same content (hippo.models.content); they are neither
        computed nor written, whatever becomes of this prefill. At least the last row is left. The
        question's rows (with a tap) are not among them. ``visual`` may be None when they cover all
        visual tokens.

        A ``tap`` (only with ``kept`` None) has its scores as soon as its layers have run over the
        whole prompt, when the piece that ends with that is yielded. It changes nothing else.
        """

    def copy_rows(self, source: int, slot: int, num_rows: int) -> None:
        """The first rows of a slot become those of another one (device thread), which need not
        hold any; what that one held is lost."""

    def forward(self, plan: StepPlan) -> torch.Tensor:
        """Feeds the rows (device thread): float32 logits ``[num_rows, num_token_ids]``.

        Row k of a sequence sees its slot's prompt, the completion before ``start_index`` as last
        written, and its own rows up to k; its logits are those of completion token
        ``start_index + k + 1``.
        """
