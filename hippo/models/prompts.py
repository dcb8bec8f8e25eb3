"""From chat messages and decoded frames to a Prompt: what all families have in common."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hippo.errors import MediaError
from hippo.models.base import DecodedMedia, Prompt
from hippo.models.messages import (
    check_length,
    media_in_order,
    refuse_placeholders,
    render,
)
from hippo.models.question import question_indices
from hippo.types import ChatMessage, FramePlan


class PromptBuilder(ABC):
    """Turns chat messages and decoded frames into a Prompt; usable from any thread."""

    def __init__(self, processor: Any, *, max_context_length: int) -> None:
        self._processor = processor
        self._max_context_length = max_context_length
        self._lock = threading.Lock()  # the tokenizer is not to be entered twice

    def build(
        self, messages: Sequence[ChatMessage], media: Sequence[DecodedMedia], frame_plan: FramePlan
    ) -> Prompt:
        """The prompt of a request; raises as VideoLanguageModel.prepare says."""
        ordered = media_in_order(messages, media)
        refuse_placeholders(messages, self._processor)
        with self._lock:
            text = render(self._processor, messages, media)
            try:
                prompt = self.process(text, ordered, frame_plan)
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
        return replace(prompt, question_indices=question)

    @abstractmethod
    def process(self, text: str, media: Sequence[DecodedMedia], frame_plan: FramePlan) -> Prompt:
        """The prompt of a rendered text, but for its question; raises ValueError for media that the
        processor refuses."""
