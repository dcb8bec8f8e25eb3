"""One worker process as its parent sees it: starting, asking, killing. All calls block.

And what both sides need: files in memory that the two processes share, and messages, each one
line of JSON and perhaps the descriptor of such a file.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import subprocess
import sys
import tempfile
from typing import Any

from hippo.subprocesses import importing_environment

_START_TIMEOUT_S = 60.0

Message = dict[str, Any]


class WorkerDiedError(Exception):
    """The process has gone or cannot go on; with the reason, if it could tell one."""


class WorkerProcess:
    """One process and the socket to it; one thread at a time asks, any may kill it meanwhile."""

    def __init__(self, settings: str) -> None:
        self._channel, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "hippo.video.worker", str(theirs.fileno()), settings],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # a terminal's Ctrl-C is for the parent
                env={
                    **importing_environment(),
                    "OPENBLAS_NUM_THREADS": "1",
                    "OMP_NUM_THREADS": "1",
                },
            )

    def wait_ready(self) -> None:
        """Waits for the new process to have started; WorkerDiedError if it does not."""
        self._channel.settimeout(_START_TIMEOUT_S)
        self._receive()
        self._channel.settimeout(None)

    def ask(self, request: Message, data: bytes) -> tuple[Message, int]:
        """The reply to a request about ``data``, and the descriptor that came with it (-1: none).

        Raises WorkerDiedError.
        """
        descriptor = shared_file(len(data))
        try:
            with map_whole(descriptor, len(data)) as memory:
                memory[:] = data
            with contextlib.suppress(ConnectionError):  # noticed at the reply
                send(self._channel, request, descriptor)
        finally:
            os.close(descriptor)
        return self._receive()

    def kill(self) -> None:
        """Ends the process; a request in flight sees it as dead."""
        self.process.kill()
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    def clean_up(self) -> None:
        """After ``kill``, when nothing is asked any more: waits for the process to be gone."""
        self.process.wait()
        self._channel.close()

    def _receive(self) -> tuple[Message, int]:
        with contextlib.suppress(OSError):
            if received := receive(self._channel):
                return received
        raise WorkerDiedError


def shared_file(size: int) -> int:
    """A descriptor of ``size`` zero bytes in memory, without a name."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("hippo-media", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        os.ftruncate(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def map_whole(descriptor: int, size: int) -> mmap.mmap:
    """Maps a shared file for both sides to read and write, its pages all at once."""
    return mmap.mmap(descriptor, size, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))


def send(channel: socket.socket, message: Message, *descriptors: int) -> None:
    """Sends a message; OSError when the other side has gone."""
    socket.send_fds(channel, [json.dumps(message).encode() + b"\n"], descriptors)


def receive(channel: socket.socket) -> tuple[Message, int] | None:
    """A message and its descriptor (-1: none); None when the other side has gone."""
    line, descriptors = bytearray(), list[int]()
    try:
        while not line.endswith(b"\n"):
            data, new, _, _ = socket.recv_fds(channel, 65536, 1)
            descriptors += new
            line += data
            if not data:
                return None
        message: Message = json.loads(line)
        return message, descriptors.pop() if descriptors else -1
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
