"""The choices of one request: a completion each, begun together and read as one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from prometheus_client import Gauge

from gateway.completion import Completion
from gateway.report import AnswerRecord
from gateway.text import Piece


class Choices:
    """``async with`` starts all completions; leaving cancels all.

    ``news`` is the event that they set. Each is counted in the gauge ``waiting`` until its prompt
    was read, and then in ``running``, until the end of its text was taken.
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
        self._gauges: dict[int, Gauge] = {}  # where each choice is counted
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Choices:
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
        """What happened in each."""
        return [completion.record for completion in self.completions]

    @property
    def usage(self) -> dict[str, Any]:
        """OpenAI's ``usage`` object, so far: the prompt once, as the choice that computed it found
        it; the completions of all."""
        num_prompt_tokens = max(record.num_prompt_tokens for record in self.records)
        num_completion_tokens = sum(record.num_completion_tokens for record in self.records)
        num_cached_tokens = min(record.num_cached_tokens for record in self.records)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_completion_tokens,
            "total_tokens": num_prompt_tokens + num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
        }

    @property
    def num_visual_tokens(self) -> int:
        """Of the prompt, counted once; 0 before a target has read it."""
        return max(record.num_visual_tokens for record in self.records)

    def fail(self) -> None:
        """An error has ended all of them; those that were finished before stay so."""
        for record in self.records:
            record.has_failed = record.finish_reason is None

    async def wait_begun(self, idle_s: float | None = None) -> bool:
        """Returns whether the prompt of a choice was read, after ``idle_s`` at the latest. Raises
        what went wrong with any before that."""
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
        """Index and text of each choice as it settles, None at its end; an empty piece when there
        was none for ``idle_s``. A slow reader gets what came meanwhile as one piece. Raises what
        ended one of them early."""
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
        """Waits until something has happened, for so long at most; whether something has."""
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
        """Counts a choice in this gauge, and in no other."""
        if (before := self._gauges.pop(index, None)) is not None:
            before.dec()
        if gauge is not None:
            gauge.inc()
            self._gauges[index] = gauge
