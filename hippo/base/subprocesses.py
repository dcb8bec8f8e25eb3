"""Helpers for parent and child processes."""

import os
import threading
from collections.abc import Callable
from pathlib import Path


def importing_environment() -> dict[str, str]:
    """Returns this process's environment, extended so that a child imports the same hippo."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def end_with_parent(last: Callable[[], object]) -> None:
    """Calls ``last`` and ends this process when standard input ends, which happens however the
    process at the other end of the pipe ends. A separate thread watches standard input."""

    def watch() -> None:
        while os.read(0, 1):  # not sys.stdin, whose lock a normal exit of the process needs
            pass
        last()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
