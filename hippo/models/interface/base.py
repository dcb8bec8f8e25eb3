"""The interface between an engine and a model: plain values in, tensors out.

A slot is the part of the KV cache that belongs to one sequence. Prompt tokens fill the slot first
(the draft caches only the kept ones). Completion token ``i`` has cache index ``prompt_length + i``:

    slot   |-- cached prompt --|-- completion 0 .. i --|   free   |
                               ^ prompt_length          ^ the next forward overwrites from here

A rollback is therefore only a smaller start index of the next step; nothing is copied or cleared.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from hippo.media.resizing import FrameLimits
from hippo.pruning.scores import Scope
from hippo.types import ChatMessage, FramePlan, MediaKind, MediaUse, ModelInfo

NO_INDICES = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class DecodedMedia:
    """The sampled frames of one media item.

    ``frames`` is uint8 ``[num_frames, height, width, 3]`` (RGB); an image has one frame.
    ``frame_seconds`` are the frames' presentation times; ``sampled_fps`` is their mean rate.
    ``is_resized`` says that the frames have the size that the model takes. ``notes`` say what of
    the file could not be used.
    """

    kind: MediaKind
    frames: torch.Tensor
    frame_seconds: tuple[float, ...]
    sampled_fps: float
    is_resized: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class VisualItem:
    """One video or image of a prompt: what the vision tower takes, and where its features go.

    Items have the same ``digest`` (hippo.models.interface.content) only if their features are
    equal.
    """

    kind: MediaKind
    digest: bytes
    places: torch.Tensor  # int64 [num_tokens], ascending indices into ``input_ids``
    grid: tuple[int, ...]  # the family's own: what its tower must know beside the pixels
    pixels: torch.Tensor | None = None  # uint8 or floating-point, on the CPU


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenized prompt with the inputs of the vision tower, on the CPU.

    ``visual_indices``, ``other_indices`` and ``question_indices`` index ``input_ids``: the prunable
    (video) tokens, which may have text between them; the other visual tokens (of images, and
    separators); and the text that asks about the videos (hippo.models.prompts.question; empty
    without prunable tokens). The features of the first two, in this order, are the rows of
    embed_visual. ``items`` lists the videos and then the images, each in the order of the prompt;
    every prunable token belongs to one item.
    """

    input_ids: torch.Tensor  # int64 [length]
    positions: torch.Tensor  # int64 [num_axes, length]
    next_position: int  # rotary position of completion token 0, on every axis: the last row's + 1
    visual_indices: torch.Tensor  # int64 [num_visual_tokens]
    visual_grids: tuple[tuple[int, int, int], ...]  # (frames, rows, columns) of each video
    question_indices: torch.Tensor  # int64 [num_question_tokens], ascending
    prompt_hash: bytes  # SHA-256 of input_ids as little-endian uint32
    other_indices: torch.Tensor = NO_INDICES  # int64 [num_other_tokens]
    items: tuple[VisualItem, ...] = ()
    media: tuple[MediaUse, ...] = ()  # in the order of the request's media
    thought_end_id: int | None = None  # of the thought that the prompt ends inside; None: of none

    @property
    def length(self) -> int:
        """Number of prompt tokens, including visual tokens."""
        return int(self.input_ids.shape[0])

    def without_pixels(self) -> "Prompt":
        """Returns the prompt without its pixels, which only the vision tower reads."""
        items = tuple(replace(item, pixels=None) for item in self.items)
        return replace(self, items=items)


@dataclass(slots=True)
class AttentionTap:
    """Requests scores of a prompt's visual tokens from one prefill, and receives them.

    A score is the attention of text to a visual token in the first ``num_layers`` layers. With the
    scope "visual" the text is the question (``prompt.question_indices``), and the softmax of a
    query is taken over the visual tokens alone. With "causal" the text is every text row behind the
    last visual token, and the softmax is over the tokens up to the row, as the model itself
    computes it.

    With ``is_alignment`` a score is instead the sum over these layers of the change, from one layer
    to the next, of the mean cosine between the visual token's hidden state and the question's
    (ParallelVLM's UV-Prune). This sum is the cosine behind the last layer minus the
    embeddings' cosine. The model's last layer cannot be among the layers, because a prefill
    computes its output for the last row only.
    """

    num_layers: int
    scope: Scope = "visual"
    is_alignment: bool = False
    # float32 [num_layers, num_visual_tokens]; of alignment, [1, num_visual_tokens]
    layer_scores: torch.Tensor | None = None
    score_ns: int = 0  # time that the device thread spent on the scores

    @property
    def scores(self) -> torch.Tensor | None:
        """The mean score over layers, float32 ``[num_visual_tokens]`` on the device; None until the
        prefill has run ``num_layers`` layers."""
        return None if self.layer_scores is None else self.layer_scores.mean(0)


class PrefillHelp(Protocol):
    """A prefill of which another device runs a part (device thread)."""

    num_rows: int  # that the helper has run through its layers
    began_ns: int  # when the helper was sent the first rows (perf_counter_ns)
    helper_ns: int  # from then to the last chunk that the helper sent
    saved_ns: int  # the time that such a prefill takes without help, less the time it took

    def add_features(self, rows: torch.Tensor) -> None:
        """Takes the next rows of embed_pieces."""

    def run(self) -> Generator[torch.Tensor | None]:
        """Yields what VideoLanguageModel.prefill yields, when all features have been added."""

    def close(self) -> None:
        """Ends the prefill, wherever it is; later calls have no effect."""


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """Completion tokens to feed to one sequence; ``token_ids[k]`` has index ``start_index + k``.

    No later step of the sequence begins before ``least_start`` (None: before this one).
    """

    slot: int
    start_index: int
    token_ids: tuple[int, ...]
    least_start: int | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward over the rows of several sequences, which are concatenated in this order."""

    sequences: tuple[SequenceRows, ...]

    @property
    def num_rows(self) -> int:
        """Number of rows of all sequences."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)


class FeatureCache(Protocol):
    """A cache of the vision tower's outputs by content; only the device thread uses it."""

    def get(self, digest: bytes, /) -> torch.Tensor | None:
        """Returns the features ``[num_tokens, width]`` of an item, read-only, or None."""

    def put(self, digest: bytes, features: torch.Tensor, /) -> None:
        """Stores the features of an item; the caller must not change them afterwards."""


class VideoLanguageModel(Protocol):
    """A loaded checkpoint with its KV cache.

    Methods marked "(device thread)" are called by that thread only.
    """

    @property
    def info(self) -> ModelInfo:
        """Describes the served model."""

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""

    @property
    def hidden_size(self) -> int:
        """Numbers of a token's embedding."""

    @property
    def frame_limits(self) -> FrameLimits:
        """What the model takes of videos and images, and samples by default."""

    @property
    def feature_bytes(self) -> int:
        """Bytes of the longest prompt's vision features."""

    @property
    def frame_bytes(self) -> int:
        """Bytes of the longest prompt's frames, as the model sees them."""

    def prepare_prompt(
        self,
        messages: Sequence[ChatMessage],
        media: Sequence[DecodedMedia],
        frame_plan: FramePlan,
        *,
        allow_special_tokens: bool = False,
        template_values: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """Applies chat template and processor; runs on any thread, without a device.

        The names of control tokens in texts are text, or with ``allow_special_tokens`` control
        tokens; then a text may not contain what stands for media. The template gets those of
        ``template_values`` that it knows.

        Raises InvalidRequestError for messages or values that the template refuses, MediaError for
        media that the processor refuses, and ContextLengthError if the prompt alone fills the
        context.
        """

    def embed_visual(
        self, prompt: Prompt, cache: FeatureCache | None = None
    ) -> torch.Tensor | None:
        """Runs the vision tower (device thread): ``[num_visual_rows, width]``, None without media.

        A row begins with the token's embedding (hidden_size numbers), which features for the first
        layers may follow (hidden_size numbers each; Qwen3-VL's deepstack).

        Items found in ``cache`` are not computed again; the others are added to it. The result,
        which must not be changed, is bit-identical with and without a cache.
        """

    def embed_pieces(
        self, prompt: Prompt, cache: FeatureCache | None = None
    ) -> Generator[torch.Tensor, None, torch.Tensor | None]:
        """Does the same in pieces (device thread): yields the rows of each, and returns all rows.

        A piece is an image or a part of a video; the caller may step other sequences between two
        pieces.
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

        A piece is a few layers over a chunk of the prompt; the caller may step other sequences
        between two pieces. The last item yielded is float32 ``[num_token_ids]``, the logits of
        completion token 0. After an early close the slot has no prompt, and its
        first ``num_reused`` rows are unchanged.

        ``kept`` (int64 indices into ``prompt.visual_indices``; None: all) selects the visual tokens
        that enter the cache, with their original positions.

        The first ``num_reused`` cached rows are in the slot already, from an earlier prefill or
        forward of equal content (hippo.models.interface.content); the prefill neither computes nor
        writes these rows. The last row is never reused, and with a tap at most its ``most_reused``
        rows (hippo.models.attention.tap) are.
        ``visual`` may be None if the reused rows include all visual tokens.

        A ``tap`` (only with ``kept`` None) has its scores when the piece that completes the tapped
        layers over the whole prompt is yielded. The tap does not change the logits.
        """

    def begin_help(
        self, slot: int, prompt: Prompt, tap: AttentionTap | None, num_reused: int
    ) -> PrefillHelp | None:
        """Begins a prefill of all visual tokens with a helper's device (device thread), before the
        vision tower runs; None if the model has none (hippo.parallel.helped), or would not gain."""

    def reusable_rows(self, slot: int, num_rows: int) -> int:
        """Returns how many of the first ``num_rows`` rows of a slot a prefill can go on behind
        (device thread): all of them, or fewer if layers have a state in place of keys and values
        (hippo.models.attention.states)."""

    def copy_rows(self, source: int, slot: int, num_rows: int) -> None:
        """Copies the first ``num_rows`` rows of slot ``source``, which are reusable, to ``slot``
        (device thread), whose previous content is lost."""

    def forward(self, plan: StepPlan) -> torch.Tensor:
        """Feeds the rows (device thread): float32 logits ``[num_rows, num_token_ids]``.

        Row k of a sequence attends to its slot's prompt, to the completion tokens before
        ``start_index`` as last written, and to rows 0 to k. Its logits choose completion
        token ``start_index + k + 1``.
        """


class DelegatingModel:
    """The base of a model that wraps another one.

    A subclass defines ``prefill`` and ``forward``; what else it does not define, the wrapped model
    does.
    """

    def __init__(self, model: VideoLanguageModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def prunable_embeddings(
    model: VideoLanguageModel, prompt: Prompt, visual: torch.Tensor
) -> torch.Tensor:
    """Returns the embeddings ``[num_visual_tokens, hidden]`` of a prompt's prunable tokens, of the
    rows ``visual`` of embed_visual."""
    return visual[: prompt.visual_indices.shape[0], : model.hidden_size]
