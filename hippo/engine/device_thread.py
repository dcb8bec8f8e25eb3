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

_LONGEST_SLEEP_NS = 3600 * 10**9  # of a wait that a client may have asked to last for ages

ResultT = TypeVar("ResultT")


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


class DeviceThread:
    """Calls ``turn`` again and again, and between two turns whatever was ``put`` in the inbox.

    ``turn`` says how long the thread may sleep in the inbox afterwards, in nanoseconds (0: not at
    all, None: until something arrives); ``on_error`` gets what it raises. ``on_idle`` is told how
    long the thread slept. All of them, and what is put, run in the thread. Made on the event loop.
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

    def put(self, function: Callable[[], None]) -> None:
        """Has the thread call it between two forwards; it must not raise."""
        self._inbox.put(function)

    async def call(self, function: Callable[[], ResultT]) -> ResultT:
        """Runs it on the thread, between two forwards; what it raises is raised here.

        From ``start`` to ``stop``: at other times nobody answers.
        """
        done: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self._inbox.put(partial(self._answer, function, done))
        return await done

    async def stop(self, last: Callable[[], None]) -> None:
        """Ends the thread, which calls ``last`` before."""
        if not self._thread.is_alive():
            return

        def stop() -> None:
            self._is_stopping = True
            last()

        await self.call(stop)
        self._thread.join()

    # --- the thread ---

    def post(self, function: Callable[..., object], *arguments: object) -> None:
        """Has the event loop call it; calls keep their order."""
        self._mailbox.post(function, *arguments)

    def receive(self, delay_ns: int | None = 0) -> None:
        """Handles all that arrived; with an empty inbox sleeps up to ``delay_ns`` (None: long)."""
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
            torch.cuda.set_device(self._device)  # a thread begins on the first one
        set_threads_here(self._num_threads)
        while not self._is_stopping:
            try:
                delay_ns = self._turn()
            except Exception as error:
                self._on_error(error)
                delay_ns = None
            self.receive(delay_ns)

    def _answer(self, function: Callable[[], ResultT], done: asyncio.Future[ResultT]) -> None:
        result, error = None, None
        try:
            result = function()
        except Exception as raised:
            error = raised
        self._mailbox.post(settle, done, result, error)
