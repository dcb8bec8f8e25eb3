"""One worker process as its parent sees it: starting, asking, killing. All calls block."""

from __future__ import annotations

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

_START_TIMEOUT_S = 60.0


class WorkerDiedError(HippoError):
    """The process has gone; ``was_ready``: after it had been ready for work."""

    def __init__(self, *, was_ready: bool) -> None:
        super().__init__("the decoder's process has gone")
        self.was_ready = was_ready


class WorkerProcess:
    """One process and the socket to it; one thread at a time asks, any may kill it meanwhile."""

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
        self._channel = ours
        self.is_ready = False

    def wait_ready(self) -> None:
        """Waits for the process to have started; WorkerDiedError if it does not."""
        if not self.is_ready:
            self._channel.settimeout(_START_TIMEOUT_S)
            self._receive()
            self._channel.settimeout(None)
            self.is_ready = True

    def ask(self, request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], int]:
        """The reply to a request about ``data``, and the descriptor that came with it (-1: none).

        Raises WorkerDiedError.
        """
        descriptor = _shared_copy(data)
        try:
            socket.send_fds(self._channel, [json.dumps(request).encode() + b"\n"], [descriptor])
        except OSError:
            raise WorkerDiedError(was_ready=True) from None
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

    def _receive(self) -> tuple[dict[str, Any], int]:
        pending, fds = bytearray(), list[int]()
        try:
            while not pending.endswith(b"\n"):
                if not receive_line(self._channel, pending, fds):
                    raise WorkerDiedError(was_ready=self.is_ready)
            reply: dict[str, Any] = json.loads(pending)
            return reply, fds.pop() if fds else -1
        except OSError:
            raise WorkerDiedError(was_ready=self.is_ready) from None
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
