"""What processes need that start others, or are started."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path


def importing_environment() -> dict[str, str]:
    """This process's environment, in which a child imports the same hippo."""
    root = str(Path(__file__).resolve().parents[1])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def end_with_parent(last: Callable[[], object]) -> None:
    """Ends this process, after ``last``, when its standard input ends: with the process that holds
    the other end of the pipe, whichever way that goes. From a thread, whatever others do."""

    def watch() -> None:
        while os.read(0, 1):  # not through sys.stdin, whose lock an ordinary end would need
            pass
        last()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
