"""A queue between producers and the consumer of a stream."""

import asyncio
from collections import deque
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


class StreamQueue(Generic[ItemT]):
    """Items in order, for one consumer on the same event loop.

    After ``close`` the consumer gets the queued items; then iteration ends, or raises the error
    once. (A reference to the error would keep its frames, and so the queue's owner, until the
    next garbage collection.)
    """

    def __init__(self) -> None:
        self._items: deque[ItemT] = deque()
        self._has_news = asyncio.Event()
        self._is_closed = False
        self._error: Exception | None = None

    def put_item(self, item: ItemT) -> None:
        """Queues an item; has no effect after ``close``."""
        if not self._is_closed:
            self._items.append(item)
            self._has_news.set()

    def close(self, error: Exception | None = None) -> None:
        """Closes the queue; later calls have no effect."""
        if not self._is_closed:
            self._is_closed = True
            self._error = error
            self._has_news.set()

    def abort(self, error: Exception | None = None) -> None:
        """Drops the queued items and closes the queue, also after ``close``."""
        self._items.clear()
        self._is_closed = False
        self.close(error)

    def __aiter__(self) -> "StreamQueue[ItemT]":
        return self

    async def __anext__(self) -> ItemT:
        while not self._items:
            if self._is_closed:
                raise self._take_error() or StopAsyncIteration
            self._has_news.clear()
            await self._has_news.wait()
        return self._items.popleft()

    def _take_error(self) -> Exception | None:
        # Not in __anext__, whose frame the error would then hold, and the frame the error.
        error, self._error = self._error, None
        return error
