"""Places for worker processes, which are replaced if they die or must be killed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from hippo.base.worker_process import ForkedWorker, WorkerDiedError, WorkerProcess
from hippo.errors import UnavailableError

ResultT = TypeVar("ResultT")

_WORKER = "hippo.video.worker"
_CLOSED = "the media decoder is closed"
_NOT_STARTED = "the media decoder does not start: is hippo-serve[engine] installed whole?"


class WorkerParent:
    """The process that workers are forked from, which the first worker starts; belongs to one event
    loop, and must be closed."""

    def __init__(self, settings: str) -> None:
        self._settings = settings
        self._process: WorkerProcess | None = None

    def fork(self) -> ForkedWorker:
        """Returns a new worker, which need not be ready."""
        if self._process is not None:
            try:
                return ForkedWorker(self._process)
            except WorkerDiedError:
                self.close()
        self._process = WorkerProcess(_WORKER, self._settings)
        return ForkedWorker(self._process)

    def close(self) -> None:
        """Ends the process; it forks no more, and its workers do not end with it."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.clean_up()


class Seat:
    """Runs one function after another with a worker, which the first function starts.

    ``on_start`` is called with what confines a new worker. Belongs to one event loop; must be
    closed.
    """

    def __init__(self, parent: WorkerParent, on_start: Callable[[list[str]], None]) -> None:
        self._parent = parent
        self._on_start = on_start
        self._worker: ForkedWorker | None = None
        self._working: asyncio.Future[Any] | None = None  # the thread that uses the worker
        self._ending: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @property
    def worker_pid(self) -> int | None:
        """Process id of the worker; None if no worker runs."""
        return None if self._worker is None else self._worker.pid

    async def start(self) -> None:
        """Starts the worker and waits until it is ready; raises UnavailableError if it fails."""
        if self._worker is None:
            try:
                ready = await self._with_worker(ForkedWorker.wait_ready)
                self._on_start(ready["confined"])
            except WorkerDiedError:
                raise UnavailableError(_NOT_STARTED) from None

    async def run(self, work: Callable[[ForkedWorker], ResultT], *, timeout_s: float) -> ResultT:
        """Runs ``work`` on a thread; kills the worker after a timeout, cancellation or crash.

        Raises what ``work`` raises, TimeoutError, and UnavailableError if the worker does not start
        or the seat is closed.
        """
        await self.start()
        return await self._with_worker(work, timeout_s=timeout_s)

    def close(self) -> None:
        """Kills the worker, also at work, which then raises UnavailableError."""
        self._is_closed = True
        self._retire()

    async def wait_ended(self) -> None:
        """Waits for the end of the workers that were killed."""
        await asyncio.gather(*self._ending)

    async def _with_worker(
        self, work: Callable[[ForkedWorker], ResultT], *, timeout_s: float | None = None
    ) -> ResultT:
        if self._is_closed:
            raise UnavailableError(_CLOSED)
        worker = self._worker = self._worker or self._parent.fork()
        self._working = asyncio.ensure_future(asyncio.to_thread(work, worker))
        try:
            async with asyncio.timeout(timeout_s):
                result: ResultT = await asyncio.shield(self._working)
                return result
        except WorkerDiedError:
            self._retire()
            if self._is_closed:
                raise UnavailableError(_CLOSED) from None
            raise
        except (asyncio.CancelledError, TimeoutError):
            self._retire()
            raise
        finally:
            self._working = None  # its error refers to this frame

    def _retire(self) -> None:
        """Kills the worker, and cleans up when the thread that uses it has ended."""
        worker, self._worker, working = self._worker, None, self._working
        if worker is None:
            return
        worker.kill()

        async def end() -> None:
            if working is not None:
                await asyncio.gather(working, return_exceptions=True)
            await asyncio.to_thread(worker.clean_up)

        task = asyncio.create_task(end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
