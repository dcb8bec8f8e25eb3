"""What is asked about the synthetic world's clips, and the target's traces of the answers.

The held-out clips have 336 x 336 pixels (a grid of 12 x 12) and 14 or 16 frames, so 1,008 or 1,152
visual tokens, and at least five objects; training uses other seeds. The question asks for a
detailed description, in both prompt orders.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer

from bench.drafts.teacher import MAX_TOKENS, target_output
from demo.figures import content_pieces
from demo.world import clips as demo_clips
from demo.world import texts
from hippo.catalog.pair import check_pair
from hippo.lab.commands.scoring import decode
from hippo.models.attention.tap import most_reused
from hippo.models.interface.base import (
    AttentionTap,
    Prompt,
    VideoLanguageModel,
    prunable_embeddings,
)
from hippo.models.interface.context import most_text_tokens
from hippo.pruning.scores import Scope
from hippo.types import ChatMessage, FramePlan, MediaPart, TextPart

SEED = 2  # separates these clips from the other benchmarks'
CONFIRM_SEED = 3  # clips on which no default was chosen
_MIN_OBJECTS = 5


@dataclass(frozen=True, slots=True)
class Sample:
    """A clip with one question about it."""

    clip: str
    video: bytes
    question: str
    answer: str  # what the target probably says, to save time
    is_video_first: bool

    @property
    def message(self) -> ChatMessage:
        """The user message with video and question in the sample's order."""
        parts: tuple[MediaPart | TextPart, ...] = (MediaPart(0), TextPart(self.question))
        return ChatMessage("user", parts if self.is_video_first else parts[::-1])


@dataclass(frozen=True, slots=True)
class SampleTrace:
    """The target's trace of one sample. ``prompt`` has no pixels."""

    prompt: Prompt
    output_ids: tuple[int, ...]  # the end token included
    content: tuple[bool, ...]  # whether only the video determines the token
    attention: dict[Scope, torch.Tensor]  # float32 [num_layers, num_visual_tokens] each
    alignment: dict[int, torch.Tensor]  # by layers tapped: float32 [num_visual_tokens]


@dataclass(frozen=True, slots=True)
class ClipTrace:
    """The visual features of a clip in both models, and the traces of its samples."""

    name: str
    grids: tuple[tuple[int, int, int], ...]
    target_features: torch.Tensor  # [num_visual_tokens, hidden], in the model's dtype
    draft_features: torch.Tensor  # embed_visual's rows, as the draft's prefill takes them
    samples: tuple[SampleTrace, ...]


def clip_samples(index: int, *, seed: int) -> tuple[Sample, Sample]:
    """Returns a held-out clip's question in both orders, the video first in the first."""
    clip = demo_clips.held_out("long", index, seed=seed, min_objects=_MIN_OBJECTS)
    rng = np.random.default_rng((demo_clips.HELD_OUT, seed, 7, index))
    asked = texts.descriptions(clip.scene, rng)[0]
    buffer = io.BytesIO()
    demo_clips.write_mp4(clip.scene, buffer, frame_rate=clip.frame_rate)
    first, second = (
        Sample(clip.name, buffer.getvalue(), asked.question, asked.answer, is_video_first)
        for is_video_first in (True, False)
    )
    return first, second


def trace_clip(
    target: VideoLanguageModel,
    draft: VideoLanguageModel,
    samples: Sequence[Sample],
    *,
    num_frames: int = 0,
    aligned_layers: Sequence[int] = (),
) -> ClipTrace:
    """Decodes the video, and runs both vision towers once and the target on every sample.

    ``num_frames`` 0 is the model's default. ``aligned_layers`` are the numbers of layers over which
    alignment is measured. Raises IncompatiblePairError for two models that a gateway refuses, and
    InvalidRequestError for what the decoder or the model refuses.
    """
    check_pair(draft.info, target.info)
    room = min(model.info.max_context_length for model in (target, draft)) - MAX_TOKENS
    room -= max(most_text_tokens(sample.question) for sample in samples)
    plan = FramePlan(num_frames=num_frames, max_visual_tokens=max(room, 1))
    media = [decode(samples[0].video, plan, target.frame_limits)]
    prompts = [target.prepare_prompt([each.message], media, FramePlan()) for each in samples]
    features = target.embed_visual(prompts[0])
    draft_features = draft.embed_visual(prompts[0])
    assert features is not None and draft_features is not None
    return ClipTrace(
        samples[0].clip,
        prompts[0].visual_grids,
        prunable_embeddings(target, prompts[0], features),
        draft_features,
        tuple(
            _trace_sample(target, sample, prompt, features, aligned_layers)
            for sample, prompt in zip(samples, prompts, strict=True)
        ),
    )


def _trace_sample(
    target: VideoLanguageModel,
    sample: Sample,
    prompt: Prompt,
    features: torch.Tensor,
    aligned_layers: Sequence[int],
) -> SampleTrace:
    alignment: dict[int, torch.Tensor] = {}
    for count in aligned_layers:
        tap = AttentionTap(count, is_alignment=True)
        pieces = target.prefill(0, prompt, features, None, tap)
        while tap.scores is None:
            next(pieces)
        pieces.close()
        alignment[count] = tap.scores
    attention: dict[Scope, torch.Tensor] = {}
    num_reused, first_id = 0, -1
    for scope in ("visual", "causal"):
        tap = AttentionTap(target.num_layers, scope)
        num_reused = min(num_reused, most_reused(tap, prompt))
        *_, logits = target.prefill(0, prompt, features, None, tap, num_reused)
        assert logits is not None and tap.layer_scores is not None
        attention[scope] = tap.layer_scores
        first_id = int(logits.argmax())
        num_reused = prompt.length - 1  # the next scope's prefill runs only the rows that score
    tokenizer = Tokenizer.from_str(target.info.tokenizer_json.decode())
    guess = tokenizer.encode(sample.answer, add_special_tokens=False).ids
    output_ids = target_output(target, first_id, guess, max_tokens=MAX_TOKENS)
    pieces_of_text = [tokenizer.decode([token_id]) for token_id in output_ids[:-1]]
    content = (*content_pieces(pieces_of_text), False)  # the end token is no content
    return SampleTrace(prompt.without_pixels(), output_ids, content, attention, alignment)
