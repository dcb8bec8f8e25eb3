"""The margin of the target's two best logits where an answer first differs from target-only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.clips import ClipFile
from bench.measure import Record


@dataclass(frozen=True, slots=True)
class Difference:
    """The first index at which an answer differs from target-only, and the margin there."""

    clip: str
    system: str
    index: int
    margin: float  # best logit minus second best, from a one-row forward


def first_differences(
    records: Sequence[Record], clips: Sequence[ClipFile], *, model: Path, dtype: str
) -> list[Difference]:
    """Returns an entry for each unequal answer; runs the target in this process, row by row."""
    unequal = [record for record in records if not record.is_equal]
    if not unequal:
        return []
    from hippo.cli.scoring import decode
    from hippo.models.base import SequenceRows, StepPlan
    from hippo.models.loading import load_model
    from hippo.models.plan import LoadPlan
    from hippo.types import ChatMessage, FramePlan, MediaPart, TextPart

    target = load_model(LoadPlan(str(model), dtype=dtype))
    questions = {clip.path.name: clip for clip in clips}
    differences = []
    for record in unequal:
        clip = questions[record.clip]
        pairs = zip(record.baseline_ids, record.answer.token_ids, strict=False)
        index = next(
            (place for place, (ours, theirs) in enumerate(pairs) if ours != theirs),
            min(len(record.baseline_ids), len(record.answer.token_ids)),
        )
        message = ChatMessage("user", (MediaPart(0), TextPart(clip.question)))
        media = decode(clip.path.read_bytes(), FramePlan())
        prompt = target.prepare_prompt([message], [media], FramePlan())
        *_, logits = target.prefill(0, prompt, target.embed_visual(prompt), None)
        assert logits is not None
        for place, token_id in enumerate(record.baseline_ids[:index]):
            logits = target.forward(StepPlan((SequenceRows(0, place, (token_id,)),)))[-1]
        best, second = logits.topk(2).values.tolist()
        differences.append(Difference(record.clip, record.system, index, best - second))
    return differences
