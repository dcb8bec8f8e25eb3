"""Runs the draft with every choice along the target's outputs, and counts where it agrees."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import torch

from bench.pruning.choices import Choice
from bench.pruning.speed import replay_agreement
from bench.pruning.statistics import Counts, difference, interval
from bench.pruning.traces import ClipTrace, SampleTrace
from hippo.lab.simulation.machine import Machine
from hippo.lab.simulation.traces import Trace
from hippo.models.interface.base import SequenceRows, StepPlan, VideoLanguageModel
from hippo.models.interface.content import compacted


def agreement(
    draft: VideoLanguageModel,
    clip: ClipTrace,
    trace: SampleTrace,
    kept: torch.Tensor,
    *,
    is_compacted: bool,
) -> tuple[bool, ...]:
    """Returns for each output token whether it equals the draft's greedy token; uses slot 0."""
    prompt = compacted(trace.prompt, kept) if is_compacted else trace.prompt
    *_, first = draft.prefill(0, prompt, clip.draft_features, kept)
    assert first is not None
    said = [int(first.argmax())]
    if len(trace.output_ids) > 1:
        rows = SequenceRows(0, 0, trace.output_ids[:-1])
        said += draft.forward(StepPlan((rows,))).argmax(-1).tolist()
    return tuple(ours == theirs for ours, theirs in zip(said, trace.output_ids, strict=True))


@dataclass(slots=True)
class ChoiceOutcome:
    """The counts of one choice over all samples."""

    choice: Choice
    tokens: Counts = field(default_factory=Counts)
    content: Counts = field(default_factory=Counts)  # for tokens that depend on the video
    num_kept: int = 0
    num_prompt_tokens: int = 0  # in the target's prompts
    num_frames: int = 0
    traces: list[Trace] = field(default_factory=list)  # each named by its clip

    def add_sample(
        self, clip: str, trace: SampleTrace, num_kept: int, agrees: tuple[bool, ...]
    ) -> None:
        """Adds the counts of one sample."""
        self.tokens.add_hits(clip, sum(agrees), len(agrees))
        self.content.add_hits(clip, sum(compress(agrees, trace.content)), sum(trace.content))
        prompt = trace.prompt
        num_dropped = prompt.visual_indices.shape[0] - num_kept
        self.traces.append(Trace(agrees, prompt.length, prompt.length - num_dropped, clip))
        self.num_kept += num_kept
        self.num_prompt_tokens += prompt.length
        self.num_frames += sum(use.num_frames for use in prompt.media)


def run_choices(
    clips: Iterable[ClipTrace], draft: VideoLanguageModel, choices: Mapping[str, Choice]
) -> dict[str, ChoiceOutcome]:
    """Runs every choice on every sample; returns outcomes by label. Choices that keep the same
    tokens are run once."""
    outcomes = {label: ChoiceOutcome(choice) for label, choice in choices.items()}
    for index, clip in enumerate(clips):
        for trace in clip.samples:
            known: dict[tuple[bytes, bool], tuple[bool, ...]] = {}
            for outcome in outcomes.values():
                kept = outcome.choice.kept(clip, trace, index)
                is_compacted = outcome.choice.is_compacted
                key = kept.numpy().tobytes(), is_compacted
                if key not in known:
                    known[key] = agreement(draft, clip, trace, kept, is_compacted=is_compacted)
                outcome.add_sample(clip.name, trace, kept.shape[0], known[key])
    return outcomes


def agreement_rows(
    outcomes: Mapping[str, ChoiceOutcome], *, references: Sequence[str], machine: Machine
) -> list[dict[str, Any]]:
    """Returns a row per choice: agreement on all tokens and on content words, tokens a pass and the
    decode speedup of adaptive, replayed on the machine, and differences.

    For each label in ``references`` a row has ``minus LABEL``, the difference from its agreement.
    """
    rows = []
    for label, outcome in outcomes.items():
        num_samples = len(outcome.traces)
        replayed = replay_agreement(outcome.traces, machine)
        rows.append(
            {
                "label": label,
                "strategy": outcome.choice.strategy.value,
                "ratio": outcome.choice.ratio,
                "num_samples": num_samples,
                "num_clips": outcome.tokens.num_clips,
                "num_frames": round(outcome.num_frames / num_samples, 1),
                "prompt_tokens": round(outcome.num_prompt_tokens / num_samples, 1),
                "kept_tokens": round(outcome.num_kept / num_samples, 1),
                "agreement": interval(outcome.tokens),
                "content_agreement": interval(outcome.content),
                "tokens_a_pass": interval(replayed.tokens_a_pass),
                "decode_speedup": interval(replayed.decode_speedup),
                **{
                    f"minus {name}": difference(outcome.tokens, outcomes[name].tokens)
                    for name in references
                    if name in outcomes
                },
            }
        )
    return rows
