"""Services forked from one process that has imported what they need.

A service takes several seconds of processor time to import torch and transformers, and the
end-to-end tests start dozens. Here one process imports them once, and each service is a fork of it,
with its own arguments, environment, session and output. Services that a `hippo` command starts are
not forked: tests/e2e/commands/test_wheel.py starts them as a user does.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import queue
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future

from hippo.base.subprocesses import importing_environment

_IMPORTED = (
    "gateway.server",
    "hippo.service.process",
    "hippo.models.load",
    "services.draft.servicer",
    "services.target.servicer",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
)
_PR_SET_PDEATHSIG = 1
_MOST_BYTES = 1 << 16  # of an order


class ForkedProcess:
    """What hippo.cli.processes.Child and tests use of subprocess.Popen."""

    def __init__(self) -> None:
        read_end, self.write_end = os.pipe()
        self.stdout = os.fdopen(read_end, "rb")
        self.begun: Future[int] = Future()  # the process id
        self.ended: Future[int] = Future()  # the exit code, negative for a signal

    @property
    def pid(self) -> int:
        return self.begun.result(100)

    @property
    def returncode(self) -> int | None:
        """None while the process runs."""
        return self.ended.result() if self.ended.done() else None

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end; raises TimeoutExpired."""
        try:
            return self.ended.result(timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0) from None

    def communicate(self, timeout: float | None = None) -> tuple[None, str]:
        """Waits for the end; returns all that was written and is not yet read, as if it had been
        written to standard error."""
        log = b"" if self.stdout.closed else self.stdout.read()
        self.stdout.close()
        self.wait(timeout)
        return None, log.decode()

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Sends a signal unless the process has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Zygote:
    """The process from which services are forked; it and its forks end with this process."""

    def __init__(self) -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._ordering = threading.Lock()
        self._ordered: queue.SimpleQueue[ForkedProcess] = queue.SimpleQueue()
        self._running: dict[int, ForkedProcess] = {}  # by process id; the reader's
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(self, module: str, arguments: Sequence[str]) -> ForkedProcess:
        """Runs ``python -m module arguments`` in a fork, as hippo.cli.processes.start_module."""
        process = ForkedProcess()
        order = json.dumps([module, list(arguments), _environment(), os.getcwd()]).encode()
        assert len(order) < _MOST_BYTES
        try:
            with self._ordering:
                self._ordered.put(process)
                socket.send_fds(self._link, [order], [process.write_end])
        finally:
            os.close(process.write_end)
        assert process.pid, "no answer from the process that forks"
        return process

    def close(self) -> None:
        """Ends the process, and with it all that are left of its forks."""
        self._process.kill()
        self._process.wait(30)
        self._reader.join(30)
        self._link.close()

    def _read(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                if message := self._link.recv(_MOST_BYTES):
                    self._note(*json.loads(message))
                    continue
            break
        lost = list(self._running.values())
        while not self._ordered.empty():
            lost.append(self._ordered.get())
            lost[-1].begun.set_result(0)
        for process in lost:
            process.ended.set_result(-signal.SIGKILL)

    def _note(self, pid: int, returncode: int | None) -> None:
        if returncode is not None:
            self._running.pop(pid).ended.set_result(returncode)
            return
        self._running[pid] = self._ordered.get()
        self._running[pid].begun.set_result(pid)


def _environment() -> dict[str, str]:
    return {**importing_environment(), "PYTHONUNBUFFERED": "1"}


def main(number: int) -> None:
    """Forks until the other end of the socket is closed; a fork returns from here as ``main`` of
    its module."""
    from hippo.models.loading.resolve import import_transformers

    import_transformers()
    for module in _IMPORTED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a fork need not look at, and so copy, what is imported
    link = socket.socket(fileno=number)
    poll = select.poll()
    poll.register(link, select.POLLIN)
    running: dict[int, int] = {}  # process ids by descriptor
    while True:
        for descriptor, _ in poll.poll():
            if descriptor != number:
                poll.unregister(descriptor)
                os.close(descriptor)
                pid = running.pop(descriptor)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                link.send(json.dumps([pid, code]).encode())
                continue
            order, descriptors, _, _ = socket.recv_fds(link, _MOST_BYTES, 1)
            if not order:
                return
            [output] = descriptors
            assert threading.active_count() == 1, "a fork has only the thread that forks"
            parent, pid = os.getpid(), os.fork()
            if pid == 0:
                module, arguments, env, folder = json.loads(order)
                link.detach()  # _become closes it
                _become(output, env, folder, parent, inherited=[number, *running])
                sys.argv = [module, *arguments]
                runpy.run_module(module, run_name="__main__", alter_sys=True)
                return
            os.close(output)
            link.send(json.dumps([pid, None]).encode())
            descriptor = os.pidfd_open(pid)
            running[descriptor] = pid
            poll.register(descriptor, select.POLLIN)


def _become(
    output: int, env: Mapping[str, str], folder: str, parent: int, *, inherited: Iterable[int]
) -> None:
    """Gives this fork its own session, output, environment and folder."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    for descriptor in (output, *inherited):
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    paths = env["PYTHONPATH"].split(os.pathsep)
    sys.path[1:1] = [path for path in paths if path not in sys.path]


if __name__ == "__main__":
    main(int(sys.argv[1]))
