"""The parent's control of a worker process, and the functions that both processes use.

A message is one line of JSON, with an optional descriptor: for instance, the descriptor of a file
in memory that both processes share. All calls block.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from typing import Any

from hippo.base.subprocesses import importing_environment

_START_TIMEOUT_S = 60.0
_NICE = 10
_ONE_BYTE = b"\n"  # sent with a descriptor alone, so that what several threads send never mixes

Message = dict[str, Any]


class WorkerDiedError(Exception):
    """The process has ended or cannot continue; the message is the reason, or empty."""


class _Worker:
    """A process and its socket; one thread at a time may use it, and any thread may kill it."""

    def __init__(self, begin: Callable[[int], None]) -> None:
        """``begin`` starts the process, which gets the descriptor of its end of the socket."""
        self._channel, theirs = socket.socketpair()
        with theirs:
            try:
                begin(theirs.fileno())
            except BaseException:
                self._channel.close()
                raise

    def wait_ready(self, settings: Message | None = None) -> Message:
        """Waits for the start of the process, which may take further ``settings``; returns its
        first message. Raises WorkerDiedError if it fails."""
        self._channel.settimeout(_START_TIMEOUT_S)
        if settings is not None:
            with contextlib.suppress(OSError):  # _receive raises WorkerDiedError
                send_message(self._channel, settings)
        reply, _ = self._receive()
        self._channel.settimeout(None)
        return reply

    def kill(self) -> None:
        """Kills the process; a running request raises WorkerDiedError."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    def clean_up(self) -> None:
        """Waits for the process to end, after ``kill`` and the last request."""
        self._channel.close()

    def _receive(self) -> tuple[Message, int]:
        with contextlib.suppress(OSError):
            if received := receive_message(self._channel):
                return received
        raise WorkerDiedError


class WorkerProcess(_Worker):
    """A process of its own, which imports what it needs."""

    process: subprocess.Popen[bytes]

    def __init__(self, module: str, settings: str = "") -> None:
        """Runs ``module`` with two arguments: the descriptor of its socket, and the settings."""

        def begin(theirs: int) -> None:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs), settings],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs],
                process_group=0,  # a terminal's Ctrl-C is for the parent
                env=_environment(),
            )

        super().__init__(begin)

    def hand_over(self, file: int) -> None:
        """Gives the process a descriptor; any thread may call it. Raises WorkerDiedError."""
        try:
            socket.send_fds(self._channel, [_ONE_BYTE], [file])
        except OSError:
            raise WorkerDiedError from None

    def kill(self) -> None:
        """See _Worker."""
        self.process.kill()
        super().kill()

    def clean_up(self) -> None:
        """See _Worker."""
        self.process.wait()
        super().clean_up()


class ForkedWorker(_Worker):
    """A child of a process that has imported what it needs: it starts in milliseconds.

    Its first message has its process id as ``pid``. A child that is killed before ends with its
    socket.
    """

    def __init__(self, parent: WorkerProcess) -> None:
        """Raises WorkerDiedError if the parent has ended."""
        super().__init__(parent.hand_over)
        self.pid: int | None = None  # before the first message
        self._handle: int | None = None  # for the id may become another process's

    def wait_ready(self, settings: Message | None = None) -> Message:
        """See _Worker."""
        reply = super().wait_ready(settings)
        self.pid = reply["pid"]
        if hasattr(os, "pidfd_open"):
            try:
                self._handle = os.pidfd_open(self.pid)
            except ProcessLookupError:
                raise WorkerDiedError from None
            except OSError:  # not allowed here
                pass
        return reply

    def ask(self, request: Message, file: int) -> tuple[Message, int]:
        """Returns the reply to a request about the media in ``file`` (a descriptor), and the
        reply's descriptor (-1: none).

        Raises WorkerDiedError.
        """
        with contextlib.suppress(ConnectionError):  # _receive raises WorkerDiedError
            send_message(self._channel, request, file)
        return self._receive()

    def kill(self) -> None:
        """See _Worker."""
        with contextlib.suppress(ProcessLookupError):
            if self._handle is not None:
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            elif self.pid is not None:
                os.kill(self.pid, signal.SIGKILL)
        super().kill()

    def clean_up(self) -> None:
        """See _Worker."""
        if self._handle is not None:
            end = select.poll()
            end.register(self._handle, select.POLLIN)
            end.poll()
            os.close(self._handle)
            self._handle = None
        super().clean_up()


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
    data = json.dumps(message).encode() + b"\n"
    num_sent = socket.send_fds(channel, [data], descriptors)
    channel.sendall(data[num_sent:])  # a socket with a timeout takes only a part of a long message


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


def receive_descriptor(channel: socket.socket) -> int | None:
    """Returns what ``hand_over`` gave, or None if the other process has ended."""
    data, descriptors, _, _ = socket.recv_fds(channel, len(_ONE_BYTE), 1)
    return descriptors[0] if data and descriptors else None


def ignore_signals() -> None:
    """Signals may reach a whole process group; this process ends when its socket closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def fork_children(channel: socket.socket, serve: Callable[[socket.socket], None]) -> None:
    """Forks a child for each socket that ``hand_over`` gives, until the other process has ended.

    ``serve`` gets the socket in the child, which ends after it. This process must have no other
    thread.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children that ended leave nothing
    while (descriptor := receive_descriptor(channel)) is not None:
        with socket.socket(fileno=descriptor) as own:
            if os.fork() == 0:
                try:
                    channel.close()
                    with contextlib.suppress(ConnectionError):
                        serve(own)
                except Exception:
                    traceback.print_exc()
                finally:
                    os._exit(0)


def give_way() -> None:
    """Lets answers in progress go first: they have nine times its share of a busy processor."""
    os.nice(_NICE)


def give_way_here() -> None:
    """The same for the calling thread alone, where threads have a priority of their own."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def limit_memory(num_bytes: int) -> None:
    """Limits the address space to its current size plus ``num_bytes``."""
    try:
        with open("/proc/self/statm") as file:
            in_use = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return  # not Linux: only the time is limited
    resource.setrlimit(resource.RLIMIT_AS, (in_use + num_bytes, in_use + num_bytes))
