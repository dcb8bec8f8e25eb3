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
from hippo.types import ChatMessage, FramePlan


class PromptBuilder(ABC):
    """Turns chat messages and decoded frames into a Prompt; usable from any thread."""

    def __init__(self, processor: Any, *, max_context_length: int) -> None:
        self._processor = processor
        self._max_context_length = max_context_length
        self._lock = threading.Lock()  # tokenizers are not thread-safe

    def build_prompt(
        self, messages: Sequence[ChatMessage], media: Sequence[DecodedMedia], frame_plan: FramePlan
    ) -> Prompt:
        """Makes a request's prompt; raises as VideoLanguageModel.prepare_prompt does."""
        ordered = media_in_order(messages, media)
        refuse_placeholders(messages, self._processor)
        with self._lock:
            text = render(self._processor, messages, media)
            try:
                prompt = self.process_inputs(text, ordered, frame_plan)
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
    def process_inputs(
        self, text: str, media: Sequence[DecodedMedia], frame_plan: FramePlan
    ) -> Prompt:
        """Makes the prompt of a rendered text, without ``question_indices``; raises ValueError for
        media that the processor refuses."""
