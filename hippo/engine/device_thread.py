"""The thread that does all device work, and the inbox through which the event loop reaches it."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from time import perf_counter_ns
from typing import Any, TypeVar

import torch

from hippo.engine.cpu import name_thread, set_threads_here

_LONGEST_SLEEP_NS = 3600 * 10**9  # bounds waits that a client may request

ResultT = TypeVar("ResultT")


def settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    """Sets the future's result, or ``error`` if it is not None, unless the future is done."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


class LoopMailbox:
    """Runs callbacks of another thread on ``loop``, in the order of their posting."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._is_scheduled = False

    def post_callback(self, callback: Callable[..., object], *args: Any) -> None:
        """Schedules a callback, which must not raise; not to be called from the loop's thread."""
        self._calls.append((callback, args))
        # Safe without a lock: _deliver() clears the flag before it reads the calls, so a call that
        # is appended while the flag is set is still delivered.
        if not self._is_scheduled:
            self._is_scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                self._calls.clear()  # the loop is closed

    def _deliver(self) -> None:
        self._is_scheduled = False
        calls = self._calls
        while calls:
            callback, args = calls.popleft()
            callback(*args)


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
        self._mailbox = LoopMailbox(asyncio.get_running_loop())
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
        self._inbox.put(lambda: None)

    async def call(self, function: Callable[[], ResultT]) -> ResultT:
        """Returns or raises the outcome of ``function``, which runs between two forwards.

        A call before ``start`` waits for it; a call after ``stop`` never returns.
        """
        done: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self._inbox.put(partial(self._answer, function, done))
        return await done

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
        """Makes the event loop call the function; calls keep their order."""
        self._mailbox.post_callback(function, *arguments)

    def handle_inbox(self, delay_ns: int | None = 0) -> None:
        """Calls the functions in the inbox; waits up to ``delay_ns`` (None: no limit) for one."""
        inbox = self._inbox
        if delay_ns != 0 and inbox.empty():
            function = None
            timeout_s = None if delay_ns is None else min(delay_ns, _LONGEST_SLEEP_NS) / 1e9
            began_ns = perf_counter_ns()
            try:
                function = inbox.get(timeout=timeout_s)
            except queue.Empty:
                pass
            self._on_idle(perf_counter_ns() - began_ns)
            if function is not None:
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

    def _answer(self, function: Callable[[], ResultT], done: asyncio.Future[ResultT]) -> None:
        result, error = None, None
        try:
            result = function()
        except Exception as raised:
            error = raised
        self._mailbox.post_callback(settle, done, result, error)
