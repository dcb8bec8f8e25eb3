"""Worker processes, forked from a process that has imported what they need: the parent's control of
them, and the functions that all use.

A message is one line of JSON, with an optional descriptor: for instance, the descriptor of a file
in memory that both processes share. All calls block.
"""

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
from collections.abc import Callable, Iterator
from typing import Any

from hippo.base.subprocesses import importing_environment
from hippo.errors import UnavailableError

_NICE = 10
_START_S = 60.0  # of the process, with its imports, on a busy machine
_ONE_BYTE = b"\n"  # sent with a descriptor alone

Message = dict[str, Any]


class WorkerDiedError(Exception):
    """The process has ended or cannot continue; the message is the reason, or empty."""


class ForkServer:
    """The process that runs ``module`` (``serve_forks``) with ``settings``. The first worker starts
    it, and it is replaced if it has ended. Any thread may use it; must be closed."""

    def __init__(self, module: str, settings: Message) -> None:
        self._module = module
        self._settings = json.dumps(settings).encode()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """None if it does not run."""
        return None if self._process is None else self._process.pid

    def fork(self, *, timeout_s: float | None = None) -> "ForkedWorker":
        """Returns a new worker, which need not be ready, and whose messages must come within
        ``timeout_s``. Raises UnavailableError if this is closed."""
        with self._lock:
            if self._is_closed:
                raise UnavailableError("the server is shutting down")
            before = self._process
            ours, theirs = socket.socketpair()
            with theirs:
                for _ in range(2):
                    if self._process is None:
                        self._start()
                    with contextlib.suppress(OSError):
                        socket.send_fds(self._channel, [_ONE_BYTE], [theirs.fileno()])
                        break
                    self._end()
            assert self._process is not None
            if timeout_s is not None:
                ours.settimeout(timeout_s + _START_S * (self._process is not before))
            return ForkedWorker(ours, self._process, timeout_s)

    def give_up(self, worker: "ForkedWorker") -> None:
        """Ends the process that was to fork a worker whose start failed, if it is still used: the
        next worker starts another process."""
        with self._lock:
            if worker.server is self._process:
                self._end()

    def close(self) -> None:
        """Ends the process; it forks no more, and its workers do not end with it."""
        with self._lock:
            self._is_closed = True
            self._end()

    def _start(self) -> None:
        self._channel, theirs = socket.socketpair()
        with theirs, in_memory(self._settings) as settings:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", self._module, str(theirs.fileno())],
                stdin=settings,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # a terminal's Ctrl-C is for the parent
                env=_environment(),
            )

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            self._channel.close()


class ForkedWorker:
    """A child of a ``ForkServer``: it starts in milliseconds. One thread at a time may use it, and
    any thread may kill it.

    Its first message has its process id as ``pid``. A child that is killed before ends with its
    socket. Messages that do not come in time are TimeoutErrors.
    """

    def __init__(
        self, channel: socket.socket, server: subprocess.Popen[bytes], timeout_s: float | None
    ) -> None:
        self.server = server
        self._channel = channel
        self._timeout_s = timeout_s  # of a message after the first, which may wait for a start
        self.pid: int | None = None  # before the first message
        self._handle: int | None = None  # for the id may become another process's

    def wait_ready(self) -> Message:
        """Returns the first message. Raises WorkerDiedError if the start fails."""
        reply, _ = self._receive()
        self._channel.settimeout(self._timeout_s)
        self.pid = reply["pid"]
        if hasattr(os, "pidfd_open"):
            try:
                self._handle = os.pidfd_open(self.pid)
            except ProcessLookupError:
                raise WorkerDiedError from None
            except OSError:  # not allowed here
                pass
        return reply

    def ask(self, request: Message, *files: int) -> tuple[Message, int]:
        """Returns the reply to a request with an optional descriptor, and the reply's descriptor
        (-1: none). Raises WorkerDiedError."""
        with contextlib.suppress(ConnectionError):  # _receive raises WorkerDiedError
            send_message(self._channel, request, *files)
        return self._receive()

    def kill(self) -> None:
        """Kills the process; a running request raises WorkerDiedError."""
        with contextlib.suppress(ProcessLookupError):
            if self._handle is not None:
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            elif self.pid is not None:
                os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    def clean_up(self) -> None:
        """Waits for the process to end, after ``kill`` and the last request."""
        if self._handle is not None:
            end = select.poll()
            end.register(self._handle, select.POLLIN)
            end.poll()
            os.close(self._handle)
            self._handle = None
        self._channel.close()

    def _receive(self) -> tuple[Message, int]:
        with contextlib.suppress(ConnectionError):
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
        descriptor = os.memfd_create("hippo", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        os.ftruncate(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def in_memory(data: bytes) -> Iterator[int]:
    """Yields the descriptor of a shared file with the data."""
    descriptor = shared_file(len(data))
    try:
        os.pwrite(descriptor, data, 0)
        yield descriptor
    finally:
        os.close(descriptor)


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


def serve_forks(begin: Callable[[Message], Callable[[socket.socket], None]]) -> None:
    """Runs a ``ForkServer``'s process: forks a child for each worker, until its parent has ended.

    ``begin`` gets the settings, and returns what serves a worker's socket in the child, which ends
    after it. This process must have no other thread.
    """
    # Signals may reach a whole process group; this process ends when its socket closes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel = socket.socket(fileno=int(sys.argv[1]))
    serve = begin(json.load(sys.stdin))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # no child can write to the file of the settings
    os.nice(_NICE)  # answers in progress have nine times its share of a busy processor
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children that ended leave nothing
    while descriptors := socket.recv_fds(channel, len(_ONE_BYTE), 1)[1]:
        with socket.socket(fileno=descriptors[0]) as own:
            if os.fork() == 0:
                try:
                    channel.close()
                    with contextlib.suppress(ConnectionError):
                        serve(own)
                except Exception:
                    traceback.print_exc()
                finally:
                    os._exit(0)


def give_way_here() -> None:
    """Lets answers in progress go before the calling thread, where threads have a priority."""
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
