"""The margin of the target's two best logits where an answer first differs from target-only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.answers.measure import Record
from bench.base.clips import ClipFile


def first_differences(
    records: Sequence[Record], clips: Sequence[ClipFile], *, model: str, dtype: str
) -> list[dict[str, Any]]:
    """Returns for each unequal answer its clip, its system, the first index at which it differs,
    and the margin there: best logit minus second best. Runs the target in this process, row by row.
    """
    unequal = [record for record in records if not record.is_equal]
    if not unequal:
        return []
    from hippo.lab.commands.scoring import decode
    from hippo.models.interface.base import SequenceRows, StepPlan
    from hippo.models.interface.plan import LoadPlan
    from hippo.models.load import load_model
    from hippo.types import ChatMessage, FramePlan, MediaPart, TextPart

    target = load_model(LoadPlan(model, dtype=dtype))
    questions = {clip.path.name: clip for clip in clips}
    differences: list[dict[str, Any]] = []
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
        found = {"clip": record.clip, "system": record.system, "index": index}
        differences.append({**found, "margin": best - second})
    return differences
