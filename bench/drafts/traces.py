"""Traces of the target on each sample, stored on disk so that experiments run only the draft.

The cache folder has one file per clip: visual features, and for each sample the prompt, the
target's greedy output and its attention scores by layer. An interrupted run continues.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tokenizers import Tokenizer

from bench.base.environment import ROOT
from bench.drafts.samples import Sample, SampleClip, SampleSource
from hippo.catalog.pair import check_pair
from hippo.client.tables import progress_bar
from hippo.errors import InvalidRequestError
from hippo.lab.commands.scoring import decode
from hippo.models.attention.tap import most_reused
from hippo.models.interface.base import (
    AttentionTap,
    Prompt,
    SequenceRows,
    StepPlan,
    VideoLanguageModel,
    VisualItem,
    prunable_embeddings,
)
from hippo.models.interface.context import most_text_tokens
from hippo.pruning.scores import Scope
from hippo.sampling.sampler import TokenSampler
from hippo.types import ChatMessage, FramePlan, MediaKind, MediaPart, MediaUse, TextPart

CACHE = ROOT / "bench/out/pruning"
MAX_TOKENS = 256


@dataclass(frozen=True, slots=True)
class SampleTrace:
    """The target's trace of one sample. ``prompt`` has no pixels."""

    sample: Sample
    prompt: Prompt
    output_ids: tuple[int, ...]  # the end token included
    content: tuple[bool, ...] | None  # of each token whether only the video determines it
    attention: dict[Scope, torch.Tensor]  # float32 [num_layers, num_visual_tokens] each
    alignment: dict[int, torch.Tensor]  # by layers tapped: float32 [num_visual_tokens]


@dataclass(frozen=True, slots=True)
class ClipTrace:
    """The visual features of a clip in both models, and the traces of its samples; on the CPU."""

    name: str
    grids: tuple[tuple[int, int, int], ...]
    target_features: torch.Tensor  # [num_visual_tokens, hidden], in the model's dtype
    draft_features: torch.Tensor  # embed_visual's rows, as the draft's prefill takes them
    samples: tuple[SampleTrace, ...]

    def on_device(self, device: str) -> ClipTrace:
        """Returns the trace with its features on the draft's device."""
        return replace(
            self,
            target_features=self.target_features.to(device),
            draft_features=self.draft_features.to(device),
        )


# Of a trace's file, whose other parts are numbers, texts and tensors.
_STORED: list[Any] = [
    ClipTrace,
    SampleTrace,
    Sample,
    Prompt,
    VisualItem,
    MediaUse,
    MediaKind,
    Scope,
]


class TraceStore:
    """A folder with the traces of one pair."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def has_trace(self, name: str) -> bool:
        """Whether the clip of this name has been traced."""
        return self._path(name).exists()

    def load_trace(self, name: str) -> ClipTrace:
        """Returns the clip's trace. Raises FileNotFoundError if it has not been traced."""
        with torch.serialization.safe_globals(_STORED):
            trace = torch.load(self._path(name), weights_only=True)
        assert isinstance(trace, ClipTrace)
        return trace

    def save_trace(self, trace: ClipTrace) -> None:
        """Writes the trace atomically."""
        path = self._path(trace.name)
        partial = path.with_suffix(".partial")
        torch.save(trace, partial)
        os.replace(partial, path)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.pt"


def trace_missing(
    console: Console,
    store: TraceStore,
    clips: Sequence[SampleClip],
    trace: Callable[[SampleClip], ClipTrace],
) -> None:
    """Traces the clips that are not in the store. Raises HippoError that names the clip."""
    missing = [clip for clip in clips if not store.has_trace(clip.name)]
    with progress_bar(console) as progress:
        for clip in progress.track(missing, description="traces of the target"):
            try:
                store.save_trace(trace(clip))
            except InvalidRequestError as error:  # of the video or the prompt
                raise InvalidRequestError(f"{clip.name}: {error}") from error


def stored_traces(
    console: Console, store: TraceStore, clips: Sequence[SampleClip], *, device: str, title: str
) -> Iterator[ClipTrace]:
    """Yields the clips' traces with a progress bar, features on ``device``."""
    with progress_bar(console) as progress:
        for clip in progress.track(clips, description=title):
            yield store.load_trace(clip.name).on_device(device)


def messages_of(sample: Sample) -> list[ChatMessage]:
    """Returns the user message with video and question in the sample's order."""
    parts: tuple[MediaPart | TextPart, ...] = (MediaPart(0), TextPart(sample.question))
    return [ChatMessage("user", parts if sample.is_video_first else parts[::-1])]


def trace_clip(
    target: VideoLanguageModel,
    draft: VideoLanguageModel,
    clip: SampleClip,
    source: SampleSource,
    *,
    num_frames: int = 0,
    aligned_layers: Sequence[int] = (),
) -> ClipTrace:
    """Decodes the video, and runs both vision towers once and the target on every sample.

    ``num_frames`` 0 is the model's default. ``aligned_layers`` are the numbers of layers over which
    alignment is measured. Raises IncompatiblePairError for two models that a
    gateway refuses, and InvalidRequestError for what the decoder or the model refuses.
    """
    check_pair(draft.info, target.info)
    room = min(model.info.max_context_length for model in (target, draft)) - MAX_TOKENS
    room -= max(most_text_tokens(sample.question) for sample in clip.samples)
    plan = FramePlan(num_frames=num_frames, max_visual_tokens=max(room, 1))
    media = [decode(clip.read_video(), plan, target.frame_limits)]
    tokenizer = Tokenizer.from_str(target.info.tokenizer_json.decode())
    features: torch.Tensor | None = None
    traced = []
    for sample in clip.samples:
        prompt = target.prepare_prompt(messages_of(sample), media, FramePlan())
        if features is None:
            features, draft_features = target.embed_visual(prompt), draft.embed_visual(prompt)
            assert features is not None and draft_features is not None
        traced.append(
            _trace_sample(target, tokenizer, sample, prompt, features, source, aligned_layers)
        )
    assert features is not None and draft_features is not None
    features, draft_features = features.cpu(), draft_features.cpu()
    if torch.equal(features, draft_features):
        draft_features = features
    prompt = traced[0].prompt
    scored = prunable_embeddings(target, prompt, features)  # shares its storage on disk too
    return ClipTrace(clip.name, prompt.visual_grids, scored, draft_features, tuple(traced))


def _trace_sample(
    target: VideoLanguageModel,
    tokenizer: Tokenizer,
    sample: Sample,
    prompt: Prompt,
    features: torch.Tensor,
    source: SampleSource,
    aligned_layers: Sequence[int],
) -> SampleTrace:
    alignment: dict[int, torch.Tensor] = {}
    for count in aligned_layers:
        tap = AttentionTap(count, is_alignment=True)
        pieces = target.prefill(0, prompt, features, None, tap)
        while tap.scores is None:
            next(pieces)
        pieces.close()
        alignment[count] = tap.scores.cpu()
    attention: dict[Scope, torch.Tensor] = {}
    num_reused, first_id = 0, -1
    for scope in ("visual", "causal"):
        tap = AttentionTap(target.num_layers, scope)
        num_reused = min(num_reused, most_reused(tap, prompt))
        *_, logits = target.prefill(0, prompt, features, None, tap, num_reused)
        assert logits is not None and tap.layer_scores is not None
        attention[scope] = tap.layer_scores.cpu()
        first_id = int(logits.argmax())
        num_reused = prompt.length - 1  # the next scope's prefill runs only the rows that score
    guess = tokenizer.encode(sample.answer, add_special_tokens=False).ids
    output_ids = target_output(target, first_id, guess, max_tokens=MAX_TOKENS)
    content = source.content_mask([tokenizer.decode([token_id]) for token_id in output_ids])
    return SampleTrace(
        sample=sample,
        prompt=prompt.without_pixels(),
        output_ids=output_ids,
        content=None if content is None else tuple(content),
        attention=attention,
        alignment=alignment,
    )


def target_output(
    model: VideoLanguageModel,
    first_id: int,
    guess: Sequence[int],
    *,
    max_tokens: int,
    sampler: TokenSampler | None = None,
) -> tuple[int, ...]:
    """Returns the output after a prefill of slot 0, its end token included; greedy without a
    ``sampler``.

    ``guess`` (such as the true answer) only saves time; it is verified like draft tokens.
    """
    ends = model.info.end_token_ids
    output = [first_id]
    while output[-1] not in ends and len(output) < max_tokens:
        place = len(output)
        follows = guess[place:max_tokens] if list(guess[:place]) == output else ()
        rows = (output[-1], *follows)
        logits = model.forward(StepPlan((SequenceRows(0, place - 1, rows),)))
        chosen = (
            logits.argmax(-1)
            if sampler is None
            else sampler.choose_for_rows(logits, tuple(output), follows)
        )
        for said, guessed in zip(chosen.tolist(), (*follows, None), strict=True):
            output.append(said)
            if said != guessed or said in ends or len(output) == max_tokens:
                break
    return tuple(output)
