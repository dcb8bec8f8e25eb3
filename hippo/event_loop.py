"""The event loop that the services and the gateway run on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


def run(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Runs ``main`` to its end as ``asyncio.run`` does, on uvloop's loop where it is installed."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(main)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's; None, which is asyncio's own, on systems that uvloop is not made for."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
