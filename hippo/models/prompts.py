"""Makes a Prompt from chat messages and decoded frames; the base class of all families."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hippo.errors import MediaError
from hippo.models.base import DecodedMedia, Prompt
from hippo.models.messages import check_length, media_in_order, refuse_placeholders, render
from hippo.models.question import question_indices
from hippo.models.resizing import resized
from hippo.types import ChatMessage, FramePlan, MediaKind, MediaUse
from hippo.video.resizing import FrameLimits


class PromptBuilder(ABC):
    """Turns chat messages and decoded frames into a Prompt; usable from any thread."""

    def __init__(
        self, processor: Any, frame_limits: FrameLimits, *, max_context_length: int
    ) -> None:
        self.frame_limits = frame_limits
        self._processor = processor
        self._max_context_length = max_context_length
        self._lock = threading.Lock()  # tokenizers are not thread-safe

    def build_prompt(
        self, messages: Sequence[ChatMessage], media: Sequence[DecodedMedia], frame_plan: FramePlan
    ) -> Prompt:
        """Makes a request's prompt; raises as VideoLanguageModel.prepare_prompt does."""
        media = [resized(item, frame_plan, self.frame_limits) for item in media]
        ordered = media_in_order(messages, media)
        refuse_placeholders(messages, self._processor)
        with self._lock:
            text = render(self._processor, messages, media)
            try:
                prompt = self.process_inputs(text, ordered)
            except ValueError as error:
                raise MediaError(f"the model's processor refuses the media: {error}") from error
            check_length(prompt.length, self._max_context_length)
            question = question_indices(
                self._processor,
                messages,
                media,
                rendered=text,
                input_ids=prompt.input_ids,
                visual_indices=prompt.visual_indices,
            )
        used = _media_use(media, ordered, prompt)
        return replace(prompt, question_indices=question, media=used)

    @abstractmethod
    def process_inputs(self, text: str, media: Sequence[DecodedMedia]) -> Prompt:
        """Makes the prompt of a rendered text and resized media, without ``question_indices`` and
        ``media``; raises ValueError for media that the processor refuses."""


def _media_use(
    media: Sequence[DecodedMedia], ordered: Sequence[DecodedMedia], prompt: Prompt
) -> tuple[MediaUse, ...]:
    """Describes the items of a request; ``ordered`` are those of the prompt, in its order."""
    shown = sorted(ordered, key=lambda item: item.kind is MediaKind.IMAGE)  # as prompt.items
    num_tokens = {
        id(item): int(visual.places.shape[0])
        for item, visual in zip(shown, prompt.items, strict=True)
    }
    return tuple(
        MediaUse(item.kind, num_frames, width, height, num_tokens[id(item)])
        for item in media
        for num_frames, height, width, _ in (item.frames.shape,)
    )
