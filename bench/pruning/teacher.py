"""Runs choices over traced clips: one pass over the clips, all choices in turn."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.pruning.agreement import DraftRunner
from bench.pruning.boundary import boundary_shares
from bench.pruning.choices import Choice
from bench.pruning.samples import places_of, sentence_cells
from bench.pruning.statistics import Counts
from bench.pruning.traces import ClipTrace, SampleTrace
from demo.figures import content_pieces

Group = Callable[["Judged"], Mapping[str, Sequence[int]]]


@dataclass(frozen=True, slots=True)
class Judged:
    """One choice on one sample: what was kept and where the draft agreed."""

    clip: ClipTrace
    trace: SampleTrace
    kept: torch.Tensor
    agrees: str  # "1" and "0", a token each

    def hits(self, places: Iterable[int] | None = None) -> tuple[int, int]:
        """Tokens agreed on and tokens in all, at those places of the output (default: all)."""
        chosen = range(len(self.agrees)) if places is None else list(places)
        return sum(self.agrees[place] == "1" for place in chosen), len(chosen)

    @property
    def content_places(self) -> list[int]:
        """Where the output has words that only the video can settle; the end token is none."""
        mask = content_pieces(self.trace.pieces[:-1])
        return [place for place, is_content in enumerate(mask) if is_content]

    def as_record(self, label: str) -> dict[str, Any]:
        """For the records' file."""
        return {
            "choice": label,
            "sample": self.trace.sample.name,
            "kept": self.kept.tolist(),
            "agrees": self.agrees,
            "output_ids": list(self.trace.output_ids),
        }


@dataclass(slots=True)
class Boundary:
    """Tokens at a boundary among those kept, and among all; each sample weighs as many as kept."""

    kept: Counts = field(default_factory=Counts.empty)
    present: Counts = field(default_factory=Counts.empty)

    def add(self, clip: str, kept: float, present: float, weight: int) -> None:
        """Counts a sample's shares."""
        self.kept.add(clip, kept * weight, weight)
        self.present.add(clip, present * weight, weight)


@dataclass(slots=True)
class Outcome:
    """A choice over all samples."""

    label: str
    choice: Choice
    tokens: Counts = field(default_factory=Counts.empty)
    content: Counts = field(default_factory=Counts.empty)
    ring: Boundary = field(default_factory=Boundary)  # the outer ring of each frame
    ends: Boundary = field(default_factory=Boundary)  # the first and last tenth of the sequence
    groups: dict[str, Counts] = field(default_factory=dict)  # tokens, by a grouping
    traces: list[list[bool]] = field(default_factory=list)
    num_kept: int = 0
    num_visual: int = 0

    def add(self, judged: Judged, group: Group | None) -> None:
        """Counts one sample."""
        clip = judged.clip.clip.name
        self.tokens.add(clip, *judged.hits())
        self.content.add(clip, *judged.hits(judged.content_places))
        kept = judged.kept.shape[0]
        if kept:
            shares = boundary_shares(judged.kept, judged.clip.grids)
            self.ring.add(clip, shares.ring_kept, shares.ring_present, kept)
            self.ends.add(clip, shares.ends_kept, shares.ends_present, kept)
        for name, places in (group(judged) if group is not None else {}).items():
            self.groups.setdefault(name, Counts.empty()).add(clip, *judged.hits(places))
        self.traces.append([mark == "1" for mark in judged.agrees])
        self.num_kept += kept
        self.num_visual += judged.clip.target_features.shape[0]


def run_choices(
    clips: Iterable[ClipTrace],
    runner: DraftRunner,
    choices: Mapping[str, Choice],
    *,
    kinds: Collection[str],
    group: Group | None = None,
    records: Path | None = None,
) -> dict[str, Outcome]:
    """Judges every choice on every sample of those kinds; ``records`` gets a line for each."""
    outcomes = {label: Outcome(label, choice) for label, choice in choices.items()}
    file = records.open("w", encoding="utf-8") if records is not None else None
    try:
        for index, clip in enumerate(clips):
            for trace in clip.samples:
                if trace.sample.kind not in kinds:
                    continue
                for label, outcome in outcomes.items():
                    kept = outcome.choice.kept(clip, trace, index)
                    agrees = runner.agreement(clip, trace, outcome.choice, kept)
                    judged = Judged(clip, trace, kept, agrees)
                    outcome.add(judged, group)
                    if file is not None:
                        file.write(json.dumps(judged.as_record(label)) + "\n")
    finally:
        if file is not None:
            file.close()
    return outcomes


def by_kind_and_place(judged: Judged) -> dict[str, Sequence[int]]:
    """The groups of both ``by_kind`` and ``by_place``; a token is in several."""
    return {**by_kind(judged), **by_place(judged)}


def by_kind(judged: Judged) -> dict[str, Sequence[int]]:
    """Groups: the kind of question, and the order of the prompt."""
    every = range(len(judged.agrees))
    sample = judged.trace.sample
    order = "video-first" if sample.is_video_first else "question-first"
    return {f"kind: {sample.kind}": every, f"order: {order}": every}


def by_place(judged: Judged) -> dict[str, Sequence[int]]:
    """Groups: tokens about objects at the border, in the centre, and about neither or several."""
    places = places_of(judged.clip.clip.scene)
    sample = judged.trace.sample
    groups: dict[str, list[int]] = {}
    if sample.subject_cells:
        found = {places.get(cell) for cell in sample.subject_cells}
        place = found.pop() if len(found) == 1 else None
        groups[_place_name("questions", place)] = list(range(len(judged.agrees)))
    elif sample.kind == "count":
        groups[_place_name("questions", None)] = list(range(len(judged.agrees)))
    else:
        cells = [*sentence_cells(judged.trace.pieces[:-1]), -1]
        for index, cell in enumerate(cells):
            name = _place_name("descriptions", places.get(cell))
            groups.setdefault(name, []).append(index)
    return dict(groups)


def _place_name(what: str, place: str | None) -> str:
    return f"{what}: {place or 'no object or several'}"
