"""From an opened request to a prompt: decode, pre-process, check; never on the device thread."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter_ns
from typing import Protocol

from hippo.errors import ContextLengthError
from hippo.models.base import DecodedMedia, Prompt, VideoLanguageModel
from hippo.types import FramePlan, Media, OpenRequest

_NUM_THREADS = 2


class Decoder(Protocol):
    """Decodes media outside this process."""

    async def decode(self, media: Media, plan: FramePlan) -> DecodedMedia: ...


class PromptReader:
    """Reads prompts for one model."""

    def __init__(self, model: VideoLanguageModel, decoder: Decoder) -> None:
        self._model = model
        self._decoder = decoder
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="prepare")

    async def read(self, request: OpenRequest) -> tuple[Prompt, int]:
        """The prompt and the nanoseconds that it took.

        Raises MediaError, InvalidRequestError, or ContextLengthError when prompt and completion
        do not fit together.
        """
        began_ns = perf_counter_ns()
        media = await asyncio.gather(
            *(self._decoder.decode(item, request.frame_plan) for item in request.media)
        )
        prompt = await asyncio.get_running_loop().run_in_executor(
            self._threads, self._model.prepare, request.messages, media, request.frame_plan
        )
        limit = self._model.info.max_context_length
        if prompt.length + request.max_tokens > limit:
            raise ContextLengthError(
                f"the prompt has {prompt.length} tokens and max_tokens is {request.max_tokens}: "
                f"together {prompt.length + request.max_tokens}, more than the context of {limit}; "
                "ask for fewer tokens, fewer frames or smaller frames",
                param="max_tokens",
            )
        return prompt, perf_counter_ns() - began_ns

    def close(self) -> None:
        """Waits for what is being prepared."""
        self._threads.shutdown(wait=True, cancel_futures=True)
