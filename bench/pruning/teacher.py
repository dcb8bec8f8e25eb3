"""Runs all choices over the traced clips in one pass."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.drafts.traces import ClipTrace, SampleTrace
from bench.pruning.agreement import DraftRunner
from bench.pruning.choices import Choice
from bench.pruning.statistics import Counts
from hippo.lab.simulation.traces import Trace


@dataclass(frozen=True, slots=True)
class Judged:
    """One choice on one sample: the kept tokens and the agreement of the draft."""

    clip: ClipTrace
    trace: SampleTrace
    kept: torch.Tensor
    agrees: str  # "1" or "0" per token

    def hits(self, places: Iterable[int] | None = None) -> tuple[int, int]:
        """Returns the numbers of agreed tokens and of tokens at ``places`` (default: all)."""
        chosen = range(len(self.agrees)) if places is None else list(places)
        return sum(self.agrees[place] == "1" for place in chosen), len(chosen)

    @property
    def content_places(self) -> list[int] | None:
        """Indices of output tokens that depend on the video; None: they are not known."""
        mask = self.trace.content
        return None if mask is None else [place for place, is_it in enumerate(mask) if is_it]

    def as_record(self, label: str) -> dict[str, Any]:
        """Returns a line for the records' file."""
        return {
            "choice": label,
            "sample": self.trace.sample.name,
            "kept": self.kept.tolist(),
            "agrees": self.agrees,
            "output_ids": list(self.trace.output_ids),
        }


@dataclass(slots=True)
class ChoiceOutcome:
    """The counts of one choice over all samples."""

    choice: Choice
    tokens: Counts = field(default_factory=Counts.empty)
    content: Counts = field(default_factory=Counts.empty)
    num_samples: int = 0
    num_kept: int = 0
    num_prompt_tokens: int = 0  # of the target's prompts
    num_frames: int = 0
    traces: list[Trace] = field(default_factory=list)  # each named by its clip

    def add_sample(self, judged: Judged) -> None:
        """Adds the counts of one sample."""
        clip = judged.clip.name
        self.tokens.add_hits(clip, *judged.hits())
        if (places := judged.content_places) is not None:
            self.content.add_hits(clip, *judged.hits(places))
        num_dropped = judged.trace.prompt.visual_indices.shape[0] - judged.kept.shape[0]
        length = judged.trace.prompt.length
        agrees = tuple(mark == "1" for mark in judged.agrees)
        self.traces.append(Trace(agrees, length, length - num_dropped, clip))
        self.num_samples += 1
        self.num_kept += judged.kept.shape[0]
        prompt = judged.trace.prompt
        self.num_prompt_tokens += prompt.length
        self.num_frames += sum(use.num_frames for use in prompt.media)


def run_choices(
    clips: Iterable[ClipTrace],
    runner: DraftRunner,
    choices: Mapping[str, Choice],
    *,
    records: Path | None = None,
) -> dict[str, ChoiceOutcome]:
    """Runs every choice on every sample; returns outcomes by label.

    If ``records`` is given, a line for each choice and sample is written to it.
    """
    outcomes = {label: ChoiceOutcome(choice) for label, choice in choices.items()}
    file = records.open("w", encoding="utf-8") if records is not None else None
    try:
        for index, clip in enumerate(clips):
            for trace in clip.samples:
                for label, outcome in outcomes.items():
                    kept = outcome.choice.kept(clip, trace, index)
                    agrees = runner.agreement(clip, trace, outcome.choice, kept)
                    judged = Judged(clip, trace, kept, agrees)
                    outcome.add_sample(judged)
                    if file is not None:
                        file.write(json.dumps(judged.as_record(label)) + "\n")
    finally:
        if file is not None:
            file.close()
    return outcomes
