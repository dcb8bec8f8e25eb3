"""Pieces of an answer's text on their way from the target to the task that reads the answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from gateway.text import Piece, join


class Pieces:
    """Takes pieces as they settle; a slow reader gets what came meanwhile as one piece."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._news = asyncio.Event()
        self._is_over = False

    def add(self, piece: Piece) -> None:
        """Takes one more."""
        self._pieces.append(piece)
        self._news.set()

    def end(self) -> None:
        """No more come."""
        self._is_over = True
        self._news.set()

    async def read(self, idle_s: float | None = None) -> AsyncIterator[Piece]:
        """All pieces to the end; an empty one when there was none for ``idle_s``."""
        while True:
            if not await is_set(self._news, idle_s):
                yield Piece()
                continue
            self._news.clear()
            is_over = self._is_over
            if self._pieces:
                piece = join(self._pieces)
                self._pieces.clear()
                yield piece
            if is_over:
                return


async def is_set(event: asyncio.Event, timeout_s: float | None) -> bool:
    """Waits for an event, for so long at most; whether it is set."""
    if not event.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await event.wait()
    return event.is_set()
