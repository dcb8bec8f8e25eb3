"""A child process; a thread reads its output line by line."""

import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from hippo.base.subprocesses import importing_environment
from hippo.errors import HippoError

_TAIL_LINES = 200


class StackError(HippoError):
    """The services on this machine cannot start, or one of them ended."""


class ProcessEndedError(StackError):
    """The process ``name`` has ended by itself."""

    def __init__(self, name: str, how: str, last_lines: Sequence[str]) -> None:
        lines = "\n".join(f"    {line}" for line in last_lines)
        super().__init__(f"the {name} process ended ({how}); its last lines:\n{lines}")
        self.name = name


def start_module(module: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    """Starts ``python -m module`` with its output in a pipe; see ``Child.start``."""
    launcher = [sys.executable, "-I", str(Path(__file__).with_name("child.py"))]
    command = [sys.executable, "-m", module, *arguments]
    # In a group of its own, so that Ctrl-C reaches only the parent, which then stops its children
    # in order. Not in a session of its own: Linux shares a core out among sessions, and a message
    # then waited up to 4 ms for a core on which the draft computed.
    return subprocess.Popen(
        [*launcher, str(os.getpid()), *command],
        env={**importing_environment(), "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        process_group=0,
    )


class Child:
    """One service as a child process. A thread calls ``on_line(name, line)`` for its output."""

    def __init__(self, name: str, on_line: Callable[[str, str], None]) -> None:
        self.name = name
        self._on_line = on_line
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)

    def start(self, module: str, arguments: Sequence[str]) -> None:
        """Runs ``python -m module``, from the checkout if hippo is not installed.

        On Linux the process ends with the thread that called this, so call it from a thread that
        lives on. Raises StackError if the previous process still runs.
        """
        if not self.wait(5.0):
            raise StackError(f"the {self.name} process still runs")
        self._tail.clear()
        self._process = start_module(module, arguments)
        self._reader = threading.Thread(target=self._read_lines, args=(self._process,), daemon=True)
        self._reader.start()

    @property
    def is_running(self) -> bool:
        """Whether the process was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process is not None
        return self._process.pid

    def check_running(self) -> None:
        """Raises ProcessEndedError with the last lines of output if the process has ended."""
        if self._process is None or (code := self._process.poll()) is None:
            return
        if self._reader is not None:
            self._reader.join(timeout=2)
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        raise ProcessEndedError(self.name, how, list(self._tail)[-12:])

    def send_signal(self, number: int) -> None:
        """Sends a signal if the process runs."""
        if self._process is not None:
            self._process.send_signal(number)  # does nothing after the end

    def wait(self, timeout_s: float) -> bool:
        """Waits up to ``timeout_s``; returns whether the process has ended."""
        if self._process is None:
            return True
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        if self._reader is not None:
            self._reader.join(timeout=2)
        return True

    def _read_lines(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as output:
            for raw in output:
                line = raw.decode("utf-8", "replace").rstrip()
                self._tail.append(line)
                self._on_line(self.name, line)
