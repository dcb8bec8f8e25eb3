"""A first prompt and first forwards, so that one-time costs do not delay a request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import torch

from hippo.engine.cpu import compute_alone
from hippo.errors import HippoError, ModelLoadError
from hippo.models.base import (
    AttentionTap,
    DecodedMedia,
    Prompt,
    SequenceRows,
    StepPlan,
    VideoLanguageModel,
)
from hippo.models.family import CachedModel
from hippo.models.linear import padded_rows
from hippo.types import ChatMessage, FramePlan, MediaKind, MediaPart, TextPart

_log = logging.getLogger(__name__)

_NUM_FRAMES = 4
_FRAME_SIZE = 112
_FRAMES_PER_SECOND = 2.0
_MAX_ROWS = 128


async def warm_up_model(
    model: VideoLanguageModel,
    device: torch.device,
    call: Callable[[Callable[[], Any]], Awaitable[Any]],
) -> Prompt:
    """Runs a prompt with a video and forwards of different sizes, and returns the prompt. ``call``
    runs a function on the device thread. Raises ModelLoadError if a forward fails."""

    def prepare() -> Prompt:
        if device.type == "cpu":
            compute_alone()
        return warm_prompt(model)

    prompt = await asyncio.to_thread(prepare)
    try:
        if isinstance(model, CachedModel):
            capturing = model.capture_steps()
            while await call(partial(next, capturing, 0)):
                pass
        await call(partial(warm_up, model, prompt, slot=0))
    except HippoError:
        raise
    except Exception as error:
        _log.error("the first forwards failed", exc_info=error)
        raise ModelLoadError(
            f"the model is loaded, but its first forwards fail: {error}"
        ) from error
    return prompt


def warm_prompt(model: VideoLanguageModel) -> Prompt:
    """Returns a short prompt with a short grey video; any thread may call it."""
    frames = torch.full((_NUM_FRAMES, _FRAME_SIZE, _FRAME_SIZE, 3), 128, dtype=torch.uint8)
    seconds = tuple(index / _FRAMES_PER_SECOND for index in range(_NUM_FRAMES))
    media = DecodedMedia(MediaKind.VIDEO, frames, seconds, _FRAMES_PER_SECOND)
    message = ChatMessage("user", (MediaPart(0), TextPart("What happens?")))
    return model.prepare_prompt([message], [media], FramePlan())


def warm_up(
    model: VideoLanguageModel, prompt: Prompt, *, slot: int, max_rows: int = _MAX_ROWS
) -> None:
    """Runs a prefill of ``slot``, then forwards of up to ``max_rows`` rows (device thread)."""
    tap = AttentionTap(1)  # because a target's prefill scores visual tokens
    *_, logits = model.prefill(slot, prompt, model.embed_visual(prompt), None, tap)
    assert logits is not None, "a prefill ends with logits"
    token_id = int(logits.argmax())
    num_rows = min(max_rows, model.info.max_context_length - prompt.length)
    for rows in sorted({min(padded_rows(rows), num_rows) for rows in range(1, num_rows + 1)}):
        plan = StepPlan((SequenceRows(slot, 0, (token_id,) * rows),))
        token_id = int(model.forward(plan)[-1].argmax())
