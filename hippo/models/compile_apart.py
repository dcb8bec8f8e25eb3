"""Compiles a layer in a process of its own: ``python -m hippo.models.compile_apart FOLDER LAYER``.

LAYER is LayerSpec.to_json's. The process has a low priority, and ends when its standard input
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

_NICENESS = 10  # a tenth of a core that others want; at 19 it takes 20 minutes under load


def main(argv: Sequence[str]) -> int:
    """Makes the package unless the folder has it; the exit code."""
    # A group, with the compiler that it runs, but not a session: Linux may share a core equally
    # among sessions, whatever their priorities.
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
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
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
