"""A first prompt and first forwards, so that no request pays for what happens only once."""

from __future__ import annotations

import torch

from hippo.models.base import (
    AttentionTap,
    DecodedMedia,
    Prompt,
    SequenceRows,
    StepPlan,
    VideoLanguageModel,
)
from hippo.models.linear import padded_rows
from hippo.types import ChatMessage, FramePlan, MediaKind, MediaPart, TextPart

_NUM_FRAMES = 4
_FRAME_SIZE = 112
_FRAMES_PER_SECOND = 2.0
_MAX_ROWS = 128


def warm_prompt(model: VideoLanguageModel) -> Prompt:
    """A short prompt with a short grey video; any thread."""
    frames = torch.full((_NUM_FRAMES, _FRAME_SIZE, _FRAME_SIZE, 3), 128, dtype=torch.uint8)
    seconds = tuple(index / _FRAMES_PER_SECOND for index in range(_NUM_FRAMES))
    media = DecodedMedia(MediaKind.VIDEO, frames, seconds, _FRAMES_PER_SECOND)
    message = ChatMessage("user", (MediaPart(0), TextPart("What happens?")))
    return model.prepare([message], [media], FramePlan())


def warm_up(
    model: VideoLanguageModel, prompt: Prompt, *, slot: int, max_rows: int = _MAX_ROWS
) -> None:
    """Device thread: a prefill of ``slot`` and forwards of up to ``max_rows`` rows after it."""
    tap = AttentionTap(1)  # scoring belongs to what happens in every prefill of a target
    *_, logits = model.prefill(slot, prompt, model.embed_visual(prompt), None, tap)
    assert logits is not None, "a prefill ends with logits"
    token_id = int(logits.argmax())
    num_rows = min(max_rows, model.info.max_context_length - prompt.length)
    for rows in sorted({min(padded_rows(rows), num_rows) for rows in range(1, num_rows + 1)}):
        plan = StepPlan((SequenceRows(slot, 0, (token_id,) * rows),))
        token_id = int(model.forward(plan)[-1].argmax())
