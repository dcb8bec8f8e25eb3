"""A child process whose output is read line by line."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from hippo.errors import HippoError
from hippo.subprocesses import importing_environment

_TAIL_LINES = 200


class StackError(HippoError):
    """The services on this machine cannot run, or one of them ended."""


class Child:
    """One service as a child process; ``on_line`` gets its output, from a thread."""

    def __init__(self, name: str, on_line: Callable[[str, str], None]) -> None:
        self.name = name
        self._on_line = on_line
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)

    def start(self, module: str, arguments: Sequence[str]) -> None:
        """Runs ``python -m module``; from the checkout too, if nothing is installed.

        Call it from a thread that stays: on Linux the process is ended with that thread.
        """
        env = {**importing_environment(), "PYTHONUNBUFFERED": "1"}
        launcher = [sys.executable, "-I", str(Path(__file__).with_name("child.py"))]
        command = [sys.executable, "-m", module, *arguments]
        if not self.wait(5.0):
            raise StackError(f"the {self.name} process still runs")
        self._tail.clear()
        # A session of its own: Ctrl-C is for the parent, which then stops its children in order.
        self._process = subprocess.Popen(
            [*launcher, str(os.getpid()), *command],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()

    @property
    def is_running(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process is not None
        return self._process.pid

    def check(self) -> None:
        """Raises StackError with its last lines if the process has ended."""
        if self._process is None or (code := self._process.poll()) is None:
            return
        if self._reader is not None:
            self._reader.join(timeout=2)
        lines = "\n".join(f"    {line}" for line in list(self._tail)[-12:])
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        raise StackError(f"the {self.name} process ended ({how}); its last lines:\n{lines}")

    def send_signal(self, number: int) -> None:
        """Sends a signal if the process is there."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def wait(self, timeout_s: float) -> bool:
        """Whether it ended within that time."""
        if self._process is None:
            return True
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        if self._reader is not None:
            self._reader.join(timeout=2)
        return True

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as output:
            for raw in output:
                line = raw.decode("utf-8", "replace").rstrip()
                self._tail.append(line)
                self._on_line(self.name, line)
