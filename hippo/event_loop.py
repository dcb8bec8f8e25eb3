"""The event loop that the services and the gateway run on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


def run(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Runs ``main`` to its end like ``asyncio.run``, on uvloop's event loop if installed."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(main)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Returns uvloop's factory, or None for asyncio's own loop if uvloop is not installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
