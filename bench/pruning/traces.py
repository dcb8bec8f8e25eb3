"""Traces of the target on each sample, stored on disk so that experiments run only the draft.

The cache folder has one file per clip: visual features, and for each sample the prompt, the
target's greedy output and its attention scores by layer. An interrupted run continues.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from tokenizers import Tokenizer

from bench.environment import ROOT
from bench.pruning.samples import SEED, Sample, held_out_clips, samples_of
from demo import clips
from demo.clips import Clip
from hippo.benchmark.tables import progress_bar
from hippo.models.base import (
    AttentionTap,
    DecodedMedia,
    Prompt,
    SequenceRows,
    StepPlan,
    VideoLanguageModel,
    prunable_embeddings,
)
from hippo.types import ChatMessage, FramePlan, MediaKind, MediaPart, TextPart

Scope = Literal["visual", "all"]
SCOPES: tuple[Scope, ...] = ("visual", "all")
CACHE = ROOT / "bench/out/pruning"
MAX_TOKENS = 256


@dataclass(frozen=True, slots=True)
class SampleTrace:
    """The target's trace of one sample. ``prompt`` has no pixels."""

    sample: Sample
    prompt: Prompt
    output_ids: tuple[int, ...]  # the end token included
    pieces: tuple[str, ...]  # the text of each output token
    attention: dict[Scope, torch.Tensor]  # float32 [num_layers, num_visual_tokens] each


@dataclass(frozen=True, slots=True)
class ClipTrace:
    """The visual features of a clip in both models, and the traces of its samples."""

    clip: Clip
    grids: tuple[tuple[int, int, int], ...]
    target_features: torch.Tensor  # float32 [num_visual_tokens, hidden]
    draft_features: torch.Tensor  # embed_visual's rows, as the draft's prefill takes them
    samples: tuple[SampleTrace, ...]


class TraceStore:
    """A folder with the traces of one pair."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def has_trace(self, clip: Clip) -> bool:
        """Whether the clip has been traced."""
        return self._path(clip).exists()

    def load_trace(self, clip: Clip) -> ClipTrace:
        """Returns the clip's trace. Raises FileNotFoundError if it has not been traced."""
        trace = torch.load(self._path(clip), weights_only=False)
        assert isinstance(trace, ClipTrace)
        return trace

    def save_trace(self, trace: ClipTrace) -> None:
        """Writes the trace atomically."""
        path = self._path(trace.clip)
        partial = path.with_suffix(".partial")
        torch.save(trace, partial)
        os.replace(partial, path)

    def _path(self, clip: Clip) -> Path:
        return self._folder / f"{clip.name}.pt"


def trace_clips(
    console: Console,
    store: TraceStore,
    target: VideoLanguageModel,
    draft: VideoLanguageModel,
    *,
    num_clips: int,
    seed: int = SEED,
) -> None:
    """Traces the clips of ``seed`` that are not in the store."""
    missing = [
        (index, clip)
        for index, clip in enumerate(held_out_clips(num_clips, seed))
        if not store.has_trace(clip)
    ]
    with progress_bar(console) as progress:
        for index, clip in progress.track(missing, description="traces of the target"):
            store.save_trace(trace_clip(target, draft, clip, samples_of(clip, index, seed)))


def stored_traces(
    console: Console, store: TraceStore, *, num_clips: int, title: str, seed: int = SEED
) -> Iterator[ClipTrace]:
    """Yields the traces with a progress bar. Raises SystemExit if one is missing."""
    with progress_bar(console) as progress:
        chosen = list(held_out_clips(num_clips, seed))
        if absent := [clip.name for clip in chosen if not store.has_trace(clip)]:
            raise SystemExit(
                f"{len(absent)} of {num_clips} clips have no trace yet: run "
                f"`python -m bench.pruning traces --clips {num_clips}` first"
            )
        for clip in progress.track(chosen, description=title):
            yield store.load_trace(clip)


def decoded_frames(clip: Clip) -> DecodedMedia:
    """Returns the frames that a service sees after the clip was encoded to H.264."""
    frames = torch.from_numpy(clips.through_codec(clip))
    seconds = tuple(place / clips.SAMPLED_PER_SECOND for place in range(len(frames)))
    return DecodedMedia(MediaKind.VIDEO, frames, seconds, float(clips.SAMPLED_PER_SECOND))


def messages_of(sample: Sample) -> list[ChatMessage]:
    """Returns the user message with video and question in the sample's order."""
    parts: tuple[MediaPart | TextPart, ...] = (MediaPart(0), TextPart(sample.question))
    return [ChatMessage("user", parts if sample.is_video_first else parts[::-1])]


def trace_clip(
    target: VideoLanguageModel, draft: VideoLanguageModel, clip: Clip, samples: Sequence[Sample]
) -> ClipTrace:
    """Runs both vision towers once, and the target on every sample."""
    media = [decoded_frames(clip)]
    tokenizer = Tokenizer.from_str(target.info.tokenizer_json.decode())
    features: torch.Tensor | None = None
    draft_features: torch.Tensor | None = None
    traced = []
    for sample in samples:
        prompt = target.prepare_prompt(messages_of(sample), media, FramePlan())
        if features is None:
            features, draft_features = target.embed_visual(prompt), draft.embed_visual(prompt)
            assert features is not None and draft_features is not None
            if torch.equal(features, draft_features):
                draft_features = features
        traced.append(_trace_sample(target, tokenizer, sample, prompt, features))
    assert features is not None and draft_features is not None
    prompt = traced[0].prompt
    scored = prunable_embeddings(target, prompt, features)  # shares its storage on disk too
    return ClipTrace(clip, prompt.visual_grids, scored, draft_features, tuple(traced))


def _trace_sample(
    target: VideoLanguageModel,
    tokenizer: Tokenizer,
    sample: Sample,
    prompt: Prompt,
    features: torch.Tensor,
) -> SampleTrace:
    attention: dict[Scope, torch.Tensor] = {}
    first_id = -1
    for scope in SCOPES:
        tap = AttentionTap(num_layers=target.num_layers, scope=scope)
        *_, logits = target.prefill(0, prompt, features, None, tap)
        assert logits is not None and tap.layer_scores is not None
        attention[scope] = tap.layer_scores.cpu()
        first_id = int(logits.argmax())
    guess = tokenizer.encode(sample.answer, add_special_tokens=False).ids
    output_ids = greedy_output(target, first_id, guess, max_tokens=MAX_TOKENS)
    return SampleTrace(
        sample=sample,
        prompt=prompt.without_pixels(),
        output_ids=output_ids,
        pieces=tuple(tokenizer.decode([token_id]) for token_id in output_ids),
        attention=attention,
    )


def greedy_output(
    model: VideoLanguageModel, first_id: int, guess: Sequence[int], *, max_tokens: int
) -> tuple[int, ...]:
    """Returns the greedy output after a prefill of slot 0, its end token included.

    ``guess`` (such as the true answer) only saves time; it is verified like draft tokens.
    """
    ends = model.info.end_token_ids
    output = [first_id]
    while output[-1] not in ends and len(output) < max_tokens:
        place = len(output)
        follows = guess[place:max_tokens] if list(guess[:place]) == output else ()
        rows = (output[-1], *follows)
        logits = model.forward(StepPlan((SequenceRows(0, place - 1, rows),)))
        for said, guessed in zip(logits.argmax(-1).tolist(), (*follows, None), strict=True):
            output.append(said)
            if said != guessed or said in ends or len(output) == max_tokens:
                break
    return tuple(output)
