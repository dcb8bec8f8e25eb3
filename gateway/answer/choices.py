"""The choices of one request: one completion per choice, started and read together."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from prometheus_client import Gauge

from gateway.answer.completion import Completion
from gateway.answer.figures import (
    CompletionTokensDetails,
    MediaUsage,
    PromptTokensDetails,
    UsageResponse,
    shown_media,
)
from gateway.answer.report import AnswerRecord
from gateway.answer.text import Piece
from hippo.base.tracing import current_span
from hippo.errors import HippoError


class Choices:
    """Runs all completions of one request: ``async with`` starts them, leaving it cancels them.

    The completions set the event ``news``. A completion is counted in the gauge ``waiting`` until
    its prompt was read, and then in ``running`` until the end of its text was taken.
    """

    def __init__(
        self,
        completions: Sequence[Completion],
        *,
        news: asyncio.Event,
        waiting: Gauge,
        running: Gauge,
    ) -> None:
        self.completions = tuple(completions)
        self._news = news
        self._waiting = waiting
        self._running = running
        self._gauges: dict[int, Gauge] = {}  # by choice: the gauge that counts it
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> "Choices":
        for index, completion in enumerate(self.completions):
            self._count(index, self._waiting)
            await self._stack.enter_async_context(completion)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for index in range(len(self.completions)):
            self._count(index, None)
        await self._stack.aclose()

    @property
    def records(self) -> list[AnswerRecord]:
        return [completion.record for completion in self.completions]

    @property
    def usage(self) -> dict[str, Any]:
        """OpenAI's ``usage`` object so far: the prompt once, with the cached tokens of the choice
        that computed it and what the model sees of the media, and the completions of all choices.
        """
        num_prompt_tokens = max(record.num_prompt_tokens for record in self.records)
        num_completion_tokens = sum(record.num_completion_tokens for record in self.records)
        num_cached_tokens = min(record.num_cached_tokens for record in self.records)
        prompts = [record.target_prompt for record in self.records]
        media = next((prompt.media for prompt in prompts if prompt is not None), ())
        shown = [MediaUsage(**shown_media(item), num_frames=item.num_frames) for item in media]
        usage = UsageResponse(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_completion_tokens,
            total_tokens=num_prompt_tokens + num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached_tokens, media=shown),
            completion_tokens_details=CompletionTokensDetails(
                reasoning_tokens=sum(record.num_thought_tokens for record in self.records)
            ),
        )
        return usage.model_dump()

    @property
    def num_visual_tokens(self) -> int:
        """Visual tokens of the prompt, counted once; 0 before the target has read the prompt."""
        return max(record.num_visual_tokens for record in self.records)

    def mark_failed(self, error: HippoError) -> None:
        """Records that ``error`` has ended all choices that were not finished."""
        current_span().fail(error)
        for record in self.records:
            record.has_failed = record.finish_reason is None

    async def wait_begun(self, idle_s: float | None = None) -> bool:
        """Returns True once the prompt of a choice was read, or False after ``idle_s`` without
        news. Raises the error of a choice that failed before its prompt was read."""
        while True:
            self._count_begun()
            for completion in self.completions:
                if completion.error is not None and not completion.has_begun:
                    raise completion.error
            if any(completion.has_begun for completion in self.completions):
                return True
            if not await self._wait_news(idle_s):
                return False

    async def pieces(self, idle_s: float | None = None) -> AsyncIterator[tuple[int, Piece | None]]:
        """Yields (index of a choice, new text), with None in place of text at the choice's end, and
        an empty piece after ``idle_s`` without text. A slow reader gets all text since its last
        read as one piece. Raises the error that ended a choice early."""
        unread = dict(enumerate(self.completions))
        while True:
            self._count_begun()
            for index, completion in list(unread.items()):
                is_over = completion.is_over
                if piece := completion.take_text():
                    yield index, piece
                if is_over:
                    if completion.error is not None:
                        raise completion.error
                    del unread[index]
                    self._count(index, None)
                    yield index, None
            if not unread:
                return
            if not await self._wait_news(idle_s):
                yield 0, Piece()

    async def _wait_news(self, idle_s: float | None) -> bool:
        """Waits at most ``idle_s`` for ``news`` and clears it; returns whether it was set."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(idle_s):
                await self._news.wait()
        has_news = self._news.is_set()
        self._news.clear()
        return has_news

    def _count_begun(self) -> None:
        for index, completion in enumerate(self.completions):
            if completion.has_begun and self._gauges.get(index) is self._waiting:
                self._count(index, self._running)

    def _count(self, index: int, gauge: Gauge | None) -> None:
        """Moves a choice to ``gauge``; None removes it from its gauge."""
        if (before := self._gauges.pop(index, None)) is not None:
            before.dec()
        if gauge is not None:
            gauge.inc()
            self._gauges[index] = gauge
