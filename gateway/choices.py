"""The choices of one request: a completion each, begun together and read as one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from prometheus_client import Gauge

from gateway.completion import Completion
from gateway.report import AnswerRecord
from gateway.sse import Usage
from gateway.text import Piece
from hippo.tasks import cancel_all


class Choices:
    """``async with`` starts all completions; leaving cancels all, and so does the first error.

    Each is counted in the gauge ``waiting`` until its prompt was read, and then in ``running``.
    """

    def __init__(
        self, completions: Sequence[Completion], *, waiting: Gauge, running: Gauge
    ) -> None:
        self.completions = tuple(completions)
        self._places = [_Place(waiting=waiting, running=running) for _ in completions]
        self._stack = contextlib.AsyncExitStack()
        self._pumps: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Choices:
        async with contextlib.AsyncExitStack() as stack:
            for completion, place in zip(self.completions, self._places, strict=True):
                stack.enter_context(place)
                await stack.enter_async_context(completion)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await cancel_all(self._pumps)
        self._pumps.clear()  # whose errors' frames hold this object
        await self._stack.aclose()

    @property
    def records(self) -> list[AnswerRecord]:
        """What happened in each."""
        return [completion.record for completion in self.completions]

    @property
    def usage(self) -> Usage:
        """So far: the prompt once, as the choice that computed it found it; the completions of
        all."""
        return Usage(
            max(record.num_prompt_tokens for record in self.records),
            sum(record.num_completion_tokens for record in self.records),
            min(record.num_cached_tokens for record in self.records),
        )

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
        if len(self.completions) == 1:
            return await self._wait_one(0, idle_s)
        tasks = [
            asyncio.create_task(self._wait_one(index)) for index in range(len(self.completions))
        ]
        try:
            done, _ = await asyncio.wait(tasks, timeout=idle_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_all(tasks)
        for task in done:
            task.result()
        return bool(done)

    async def pieces(self, idle_s: float | None = None) -> AsyncIterator[tuple[int, Piece | None]]:
        """Index and text of each choice as it settles, None at its end; an empty piece when there
        was none for ``idle_s``. Raises what ended one of them early."""
        if len(self.completions) == 1:
            async for piece in self.completions[0].pieces(idle_s):
                yield 0, piece
            yield 0, None
            return
        ready: asyncio.Queue[tuple[int, Piece | None] | Exception] = asyncio.Queue(maxsize=1)
        self._pumps = [
            asyncio.create_task(self._pump(index, ready)) for index in range(len(self.completions))
        ]
        num_running = len(self._pumps)
        while num_running:
            try:
                async with asyncio.timeout(idle_s):
                    item = await ready.get()
            except TimeoutError:
                yield 0, Piece()
                continue
            if isinstance(item, Exception):
                raise item
            num_running -= item[1] is None
            yield item

    async def _pump(
        self, index: int, ready: asyncio.Queue[tuple[int, Piece | None] | Exception]
    ) -> None:
        """One choice's pieces. A slow reader holds it up, but no stream: text is joined."""
        try:
            await self._wait_one(index)
            async for piece in self.completions[index].pieces():
                await ready.put((index, piece))
            self._places[index].leave()
            await ready.put((index, None))
        except Exception as error:
            await ready.put(error)

    async def _wait_one(self, index: int, idle_s: float | None = None) -> bool:
        has_begun = await self.completions[index].wait_begun(idle_s)
        if has_begun:
            self._places[index].begin()
        return has_begun


class _Place:
    """Where a sequence is counted: among those that wait, then among those that run."""

    def __init__(self, *, waiting: Gauge, running: Gauge) -> None:
        self._gauges = (waiting, running)
        self._gauge: Gauge | None = None

    def __enter__(self) -> None:
        self._move(self._gauges[0])

    def begin(self) -> None:
        """It runs; only the first call counts."""
        if self._gauge is self._gauges[0]:
            self._move(self._gauges[1])

    def leave(self) -> None:
        """It is over."""
        self._move(None)

    def __exit__(self, *exc_info: object) -> None:
        self.leave()

    def _move(self, gauge: Gauge | None) -> None:
        if self._gauge is not None:
            self._gauge.dec()
        self._gauge = gauge
        if gauge is not None:
            gauge.inc()
