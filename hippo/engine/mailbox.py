"""From the device thread to the event loop: many calls, one wake-up."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any


def settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    """Ends a wait on the event loop with what another thread came to, unless nobody waits now."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


class LoopMailbox:
    """Runs callbacks on ``loop`` in the order in which another thread posted them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._is_scheduled = False

    def post(self, callback: Callable[..., object], *args: Any) -> None:
        """From any thread but the loop's; ``callback`` must not raise."""
        self._calls.append((callback, args))
        # Safe without a lock: deliver() clears the flag before it looks at the calls, so a call
        # that is appended before the flag is read as set is still delivered.
        if not self._is_scheduled:
            self._is_scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                self._calls.clear()  # the loop is closed: nobody is left to hear

    def _deliver(self) -> None:
        self._is_scheduled = False
        calls = self._calls
        while calls:
            callback, args = calls.popleft()
            callback(*args)
