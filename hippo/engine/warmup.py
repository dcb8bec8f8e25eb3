"""A first prompt and first forwards, so that one-time costs do not delay a request."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch

from hippo.engine.cpu import compute_alone
from hippo.errors import ContextLengthError, HippoError, ModelLoadError
from hippo.models.cached import CachedModel
from hippo.models.interface.base import (
    AttentionTap,
    DecodedMedia,
    Prompt,
    SequenceRows,
    StepPlan,
    VideoLanguageModel,
)
from hippo.models.interface.context import most_kept
from hippo.models.products.linear import padded_rows
from hippo.types import ChatMessage, FramePlan, MediaKind, MediaPart, TextPart

_log = logging.getLogger(__name__)

_NUM_FRAMES = 4
_FRAME_SIZE = 112
_FRAMES_PER_SECOND = 2.0
_MAX_ROWS = 128
_GRID_SIDE = 16  # tokens on a side of a frame whose size the model leaves open


async def warm_up_model(
    model: VideoLanguageModel,
    device: torch.device,
    call: Callable[[Callable[[], Any]], Awaitable[Any]],
    num_tapped: int,
) -> Prompt:
    """Runs a prompt with a video and forwards of different sizes, and returns the prompt. ``call``
    runs a function on the device thread. The first ``num_tapped`` layers score visual tokens, as in
    the service's own prefills; 0: none does. Raises ModelLoadError if a forward fails."""

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
        await call(partial(warm_up, model, prompt, slot=0, num_tapped=num_tapped))
        if device.type == "cuda":  # on a CPU a lack of memory ends the process, with no error
            longest = await asyncio.to_thread(longest_prompt, model, prompt)
            await call(partial(run_longest, model, longest, slot=0, num_tapped=num_tapped))
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
    return _grey_prompt(model, _NUM_FRAMES, (_FRAME_SIZE, _FRAME_SIZE), is_resized=False)


def longest_prompt(model: VideoLanguageModel, prompt: Prompt) -> Prompt:
    """Returns the prompt with the longest grey video for which the context has room, and a slot for
    the text between its frames; ``prompt`` is the model's warm_prompt. Any thread may call it."""
    limits = model.frame_limits
    side = _GRID_SIDE * limits.side_multiple
    size, num_tokens = (side, side), _GRID_SIDE**2
    if limits.fixed_size is not None:
        size, num_tokens = limits.fixed_size, math.prod(prompt.visual_grids[0][1:])
    fitting, most = 0, (model.info.max_context_length - 1 - _num_others(prompt)) // num_tokens
    tried = most
    while fitting < most:
        try:
            longer = _grey_prompt(model, tried * limits.frame_multiple, size, is_resized=True)
            has_room = _num_others(longer) < model.info.slot_tokens
        except ContextLengthError:  # some families write text before each frame
            has_room = False
        if has_room:
            fitting, prompt = tried, longer
        else:
            most = tried - 1
        tried = (fitting + most + 1) // 2
    return prompt


def _grey_prompt(
    model: VideoLanguageModel, num_frames: int, size: tuple[int, int], *, is_resized: bool
) -> Prompt:
    frames = torch.full((1, *size, 3), 128, dtype=torch.uint8).expand(num_frames, -1, -1, -1)
    seconds = tuple(index / _FRAMES_PER_SECOND for index in range(num_frames))
    media = DecodedMedia(MediaKind.VIDEO, frames, seconds, _FRAMES_PER_SECOND, is_resized)
    message = ChatMessage("user", (MediaPart(0), TextPart("What happens?")))
    return model.prepare_prompt([message], [media], FramePlan())


def _num_others(prompt: Prompt) -> int:
    return prompt.length - int(prompt.visual_indices.shape[0])


def _prefill(
    model: VideoLanguageModel, prompt: Prompt, slot: int, num_tapped: int
) -> tuple[torch.Tensor, int]:
    """Returns the logits, and how many tokens went into the slot: of the visual tokens the first,
    as many as it has room for beside a few tokens of an answer."""
    kept, num_tokens = None, prompt.length
    if prompt.length >= model.info.slot_tokens:
        num_kept = most_kept(model.info.slot_tokens, _num_others(prompt), _MAX_ROWS)
        kept, num_tokens = torch.arange(num_kept), _num_others(prompt) + num_kept
    tap = AttentionTap(num_tapped) if num_tapped else None
    *_, logits = model.prefill(slot, prompt, model.embed_visual(prompt), kept, tap)
    assert logits is not None, "a prefill ends with logits"
    return logits, num_tokens


def run_longest(model: VideoLanguageModel, prompt: Prompt, *, slot: int, num_tapped: int) -> None:
    """Runs the prefill of ``longest_prompt`` (device thread), so that a lack of memory shows at the
    start. Raises ModelLoadError if the device's memory does not suffice."""
    began_s = perf_counter()
    try:
        _, num_tokens = _prefill(model, prompt, slot, num_tapped)
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(". ")[0]
        raise ModelLoadError(
            f"{model.info.name}: a prompt of {prompt.length} tokens does not fit beside weights "
            f"and {model.info.num_slots} slots ({reason}): lower --max-context-length, --slots or "
            "--memory-gib"
        ) from error
    elapsed_s = perf_counter() - began_s
    _log.info("the longest prompt, of %d tokens, was read in %.1f s", num_tokens, elapsed_s)


def warm_up(
    model: VideoLanguageModel,
    prompt: Prompt,
    *,
    slot: int,
    num_tapped: int = 0,
    max_rows: int = _MAX_ROWS,
) -> None:
    """Runs a prefill of ``slot``, then forwards of up to ``max_rows`` rows (device thread)."""
    logits, num_tokens = _prefill(model, prompt, slot, num_tapped)
    token_id = int(logits.argmax())
    num_rows = min(max_rows, model.info.slot_tokens - num_tokens)
    for rows in sorted({min(padded_rows(rows), num_rows) for rows in range(1, num_rows + 1)}):
        plan = StepPlan((SequenceRows(slot, 0, (token_id,) * rows),))
        token_id = int(model.forward(plan)[-1].argmax())
