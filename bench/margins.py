"""How close the call was where two answers first differ: the target's two best logits there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.clips import Clip
from bench.measure import Record


@dataclass(frozen=True, slots=True)
class Difference:
    """The first index at which an answer differs from target-only's, and the margin there."""

    clip: str
    system: str
    index: int
    margin: float  # best logit minus second best, of a one-row forward


def first_differences(
    records: Sequence[Record], clips: Sequence[Clip], *, model: Path, dtype: str
) -> list[Difference]:
    """One entry for each unequal answer; runs the target in this process, row by row."""
    unequal = [record for record in records if not record.is_equal]
    if not unequal:
        return []
    from hippo.models.base import SequenceRows, StepPlan
    from hippo.models.loading import load_model
    from hippo.models.plan import LoadPlan
    from hippo.types import ChatMessage, FramePlan, Media, MediaKind, MediaPart, TextPart
    from hippo.video.decoder import MediaDecoder

    target = load_model(LoadPlan(str(model), dtype=dtype))

    async def decoded(path: Path) -> object:
        async with MediaDecoder() as decoder:
            return await decoder.decode(Media(MediaKind.VIDEO, path.read_bytes()), FramePlan())

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
        prompt = target.prepare([message], [asyncio.run(decoded(clip.path))], FramePlan())  # type: ignore[list-item]
        *_, logits = target.prefill(0, prompt, target.embed_visual(prompt), None)
        assert logits is not None
        for place, token_id in enumerate(record.baseline_ids[:index]):
            logits = target.forward(StepPlan((SequenceRows(0, place, (token_id,)),)))[-1]
        best, second = logits.topk(2).values.tolist()
        differences.append(Difference(record.clip, record.system, index, best - second))
    return differences
