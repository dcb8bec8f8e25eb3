"""The thread that does all device work, and the inbox through which the event loop reaches it."""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from time import perf_counter_ns
from typing import TypeVar

import torch

from hippo.engine.cpu import name_thread, set_threads_here

_LONGEST_SLEEP_NS = 3600 * 10**9  # bounds waits that a client may request

ResultT = TypeVar("ResultT")


def run_into(done: Future[ResultT], function: Callable[[], ResultT]) -> None:
    """Calls the function, unless nobody waits for it any more, and sets its outcome."""
    if done.set_running_or_notify_cancel():
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error)


def _nothing() -> None:
    pass


class DeviceThread:
    """Calls ``turn`` repeatedly, and between two turns the functions in the inbox.

    ``turn`` returns how long the thread may then wait for the inbox, in nanoseconds (0: not at all,
    None: until a function arrives). ``on_error`` gets the exceptions of ``turn``, and ``on_idle``
    gets the duration of each wait in ns. All of these run in the thread. Create on the event loop.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        turn: Callable[[], int | None],
        on_error: Callable[[Exception], None],
        on_idle: Callable[[int], None],
    ) -> None:
        self._device = device
        self._turn = turn
        self._on_error = on_error
        self._on_idle = on_idle
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._num_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="device")
        self._is_stopping = False

    # --- event loop ---

    def start(self) -> None:
        self._thread.start()

    def call_soon(self, function: Callable[[], None]) -> None:
        """Queues a function, which must not raise, for a call between two forwards."""
        self._inbox.put(function)

    def wake(self) -> None:
        """Lets the thread take its next turn; for any thread."""
        self._inbox.put(_nothing)

    async def call(self, function: Callable[[], ResultT]) -> ResultT:
        """Returns or raises the outcome of ``function``, which runs between two forwards.

        A call before ``start`` waits for it; a call after ``stop`` never returns.
        """
        done: Future[ResultT] = Future()
        self._inbox.put(partial(run_into, done, function))
        return await asyncio.wrap_future(done)

    async def stop(self, last: Callable[[], None]) -> None:
        """Ends the thread after a call of ``last`` in the thread."""
        if not self._thread.is_alive():
            return

        def stop() -> None:
            self._is_stopping = True
            last()

        await self.call(stop)
        self._thread.join()

    # --- the thread ---

    def call_on_loop(self, function: Callable[..., object], *arguments: object) -> None:
        """Makes the event loop call the function, which must not raise; calls keep their order."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)

    def handle_inbox(self, delay_ns: int | None = 0) -> None:
        """Calls the functions in the inbox; waits up to ``delay_ns`` (None: no limit) for one."""
        inbox = self._inbox
        if delay_ns != 0 and inbox.empty():
            function: Callable[[], None] = _nothing
            timeout_s = None if delay_ns is None else min(delay_ns, _LONGEST_SLEEP_NS) / 1e9
            began_ns = perf_counter_ns()
            with contextlib.suppress(queue.Empty):
                function = inbox.get(timeout=timeout_s)
            self._on_idle(perf_counter_ns() - began_ns)
            function()
        while not inbox.empty():
            inbox.get_nowait()()

    def _run(self) -> None:
        name_thread("device")
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # the default of a new thread is cuda:0
        set_threads_here(self._num_threads)
        while not self._is_stopping:
            try:
                delay_ns = self._turn()
            except Exception as error:
                self._on_error(error)
                delay_ns = None
            self.handle_inbox(delay_ns)
