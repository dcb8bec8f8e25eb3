"""Compiles a layer in a process of its own: ``python -m hippo.models.compile_apart FOLDER LAYER``.

LAYER is LayerSpec.to_json's. The process has the lowest priority, and ends when its standard input
does: with the process that holds the other end. What goes wrong is the last line on standard error.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from hippo.models.compiled_layer import LayerSpec
from hippo.models.compiled_packages import make_package

_LEAST_PRIORITY = 19


def main(argv: Sequence[str]) -> int:
    """Makes the package unless the folder has it; the exit code."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(OSError):
        os.nice(_LEAST_PRIORITY)
    folder, layer = argv
    logging.basicConfig(level=logging.ERROR)
    try:
        make_package(LayerSpec.from_json(layer), Path(folder))
    except Exception as error:  # whatever a compiler may raise
        first_line = str(error).strip().partition("\n")[0]
        sys.stderr.write(f"\n{type(error).__name__}: {first_line}\n")
        return 1
    return 0


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1):  # not through sys.stdin, whose lock the end would need
        pass
    if os.getsid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)  # the compiler that it runs, too
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
