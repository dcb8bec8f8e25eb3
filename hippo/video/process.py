"""One worker process as its parent sees it: starting, asking, killing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from typing import Any

from hippo.errors import HippoError
from hippo.subprocesses import importing_environment
from hippo.video.worker import receive_line, shared_file

LARGE_BYTES = 4 << 20  # copied or mapped on a thread, so that the event loop goes on
_START_TIMEOUT_S = 60.0


class WorkerDiedError(HippoError):
    """The process has gone; ``was_ready``: after it had been ready for work."""

    def __init__(self, *, was_ready: bool) -> None:
        super().__init__("the decoder's process has gone")
        self.was_ready = was_ready


class WorkerProcess:
    """One process and the socket to it; at most one request at a time."""

    def __init__(self, settings: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as on_failure:
            on_failure.callback(ours.close)
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "hippo.video.worker", str(theirs.fileno()), settings],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={
                    **importing_environment(),
                    "OPENBLAS_NUM_THREADS": "1",
                    "OMP_NUM_THREADS": "1",
                },
            )
            on_failure.pop_all()
        ours.setblocking(False)
        self._channel = ours
        self._is_ready = False
        self._starting = asyncio.Lock()
        self._readable: asyncio.Future[None] | None = None  # what a request in flight waits for

    async def wait_ready(self) -> None:
        """Waits for the process to have started; at once if it has."""
        async with self._starting:
            if self._is_ready:
                return
            try:
                async with asyncio.timeout(_START_TIMEOUT_S):
                    await self._receive()
            except TimeoutError:
                raise WorkerDiedError(was_ready=False) from None
            self._is_ready = True

    async def ask(self, request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], int]:
        """Sends a request and waits for its reply and descriptor (-1: none)."""
        if len(data) < LARGE_BYTES:
            descriptor = _shared_copy(data)
        else:
            copying = asyncio.ensure_future(asyncio.to_thread(_shared_copy, data))
            try:
                descriptor = await asyncio.shield(copying)
            except asyncio.CancelledError:
                copying.add_done_callback(lambda done: os.close(done.result()))
                raise
        try:
            line = json.dumps(request).encode() + b"\n"
            socket.send_fds(self._channel, [line], [descriptor])
        except OSError:
            raise WorkerDiedError(was_ready=True) from None
        finally:
            os.close(descriptor)
        return await self._receive()

    def kill(self) -> None:
        """Ends the process, to be waited for; a request in flight sees it as dead."""
        self.process.kill()
        if self._readable is not None:
            asyncio.get_running_loop().remove_reader(self._channel)
            _resolve(self._readable)
        self._channel.close()

    async def _wait_readable(self) -> None:
        loop = asyncio.get_running_loop()
        self._readable = loop.create_future()
        loop.add_reader(self._channel, _resolve, self._readable)
        try:
            await self._readable
        finally:
            self._readable = None
            if self._channel.fileno() >= 0:
                loop.remove_reader(self._channel)

    async def _receive(self) -> tuple[dict[str, Any], int]:
        pending, fds = bytearray(), list[int]()
        try:
            while not pending.endswith(b"\n"):
                if self._channel.fileno() >= 0:
                    await self._wait_readable()
                with contextlib.suppress(BlockingIOError):
                    if not receive_line(self._channel, pending, fds):
                        raise WorkerDiedError(was_ready=self._is_ready)
            reply = json.loads(pending)
            assert isinstance(reply, dict)
            return reply, fds.pop() if fds else -1
        except OSError:
            raise WorkerDiedError(was_ready=self._is_ready) from None
        finally:
            for descriptor in fds:
                os.close(descriptor)


def _shared_copy(data: bytes) -> int:
    """A descriptor of a shared file that holds ``data``."""
    descriptor = shared_file(len(data))
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    return descriptor


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
