"""Tasks that end together when one fails, and errors that keep nothing alive."""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from traceback import clear_frames
from typing import Any, TypeVar

from hippo.errors import HippoError

ResultT = TypeVar("ResultT")


async def gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """Runs all coroutines concurrently and returns their results in order.

    Raises the first error, or a cancellation, after all other coroutines are cancelled and over.
    (``asyncio.gather`` lets them continue.)
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)
        del tasks  # breaks a reference cycle: their errors refer to this frame


async def cancel_all(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancels the tasks and waits until all are over."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class ClearingFrames:
    """A context manager that frees the local variables of the functions that an error leaves inside
    the block.

    Whoever keeps the error, as a task and gRPC do, would otherwise keep these variables until the
    next garbage collection: a request's media, or a sequence with its prompt's embeddings.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, HippoError):
            # Several requests may have the same error. The frames of a request that is still at
            # its end must not be cleared: before Python 3.13 that closes its coroutine.
            error.__traceback__ = None
        elif error is not None:
            clear_frames(error.__traceback__)


def start_task(coroutine: Coroutine[Any, Any, ResultT]) -> asyncio.Task[ResultT]:
    """Starts a task whose error keeps none of the coroutine's variables alive."""

    async def run() -> ResultT:
        with ClearingFrames():
            return await coroutine

    task = asyncio.create_task(run())
    task.add_done_callback(lambda _: coroutine.close())  # it may not have begun
    return task
