"""The parent's control of a worker process, and the functions that both processes use.

The two processes share files in memory. A message is one line of JSON, with an optional descriptor
of a shared file. All calls block.
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
    """The process has ended or cannot continue; the message is the reason, or empty."""


class WorkerProcess:
    """One process and its socket; one thread at a time may use it, and any thread may kill it."""

    def __init__(self, settings: str) -> None:
        self._channel, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "hippo.video.worker", str(theirs.fileno()), settings],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # a terminal's Ctrl-C is for the parent
                env=_environment(),
            )

    def wait_ready(self) -> list[str]:
        """Waits for the start of the process, and returns what confines it (see
        hippo.video.confinement). Raises WorkerDiedError if it fails."""
        self._channel.settimeout(_START_TIMEOUT_S)
        reply, _ = self._receive()
        self._channel.settimeout(None)
        confined: list[str] = reply["confined"]
        return confined

    def ask(self, request: Message, file: int) -> tuple[Message, int]:
        """Returns the reply to a request about the media in ``file`` (a descriptor), and the
        reply's descriptor (-1: none).

        Raises WorkerDiedError.
        """
        with contextlib.suppress(ConnectionError):  # _receive raises WorkerDiedError
            send_message(self._channel, request, file)
        return self._receive()

    def kill(self) -> None:
        """Kills the process; a running request raises WorkerDiedError."""
        self.process.kill()
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    def clean_up(self) -> None:
        """Waits for the process to end, after ``kill`` and the last request."""
        self.process.wait()
        self._channel.close()

    def _receive(self) -> tuple[Message, int]:
        with contextlib.suppress(OSError):
            if received := receive_message(self._channel):
                return received
        raise WorkerDiedError


def _environment() -> dict[str, str]:
    """Returns what the interpreter needs of this process's environment, and no more: the rest may
    have secrets."""
    needed = {
        name: value
        for name, value in importing_environment().items()
        if name.startswith("PYTHON") or name == "LD_LIBRARY_PATH"
    }
    return {**needed, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def shared_file(size: int) -> int:
    """Returns the descriptor of an unnamed file in memory of ``size`` zero bytes."""
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
    """Maps a shared file for reading and writing, with all pages populated."""
    return mmap.mmap(descriptor, size, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))


def send_message(channel: socket.socket, message: Message, *descriptors: int) -> None:
    """Sends a message; raises OSError if the other process has ended."""
    socket.send_fds(channel, [json.dumps(message).encode() + b"\n"], descriptors)


def receive_message(channel: socket.socket) -> tuple[Message, int] | None:
    """Returns a message and its descriptor (-1: none), or None if the other process has ended."""
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
