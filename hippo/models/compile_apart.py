"""Compiles a layer in a process of its own: ``python -m hippo.models.compile_apart FOLDER LAYER``.

LAYER is LayerSpec.to_json's. The process has a low priority, and ends when its standard input
does: with the process that holds the other end. What goes wrong is the last line on standard error.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hippo.subprocesses import end_with_parent

_NICENESS = 10  # a tenth of a core that others want; at 19 it takes more than 10 minutes under load
_PATIENCE_S = 3600.0  # for a process with the same priority that makes the same


def main(argv: Sequence[str]) -> int:
    """Makes the package unless the folder has it; the exit code."""
    _step_back()
    # Not before: torch's import takes seconds.
    from hippo.models.compiled_layer import LayerSpec
    from hippo.models.compiled_packages import make_package

    folder, layer = argv
    try:
        make_package(LayerSpec.from_json(layer), Path(folder), patience_s=_PATIENCE_S)
    except Exception as error:  # whatever a compiler may raise
        first_line = str(error).strip().partition("\n")[0]
        sys.stderr.write(f"\n{error}\n{type(error).__name__}: {first_line}\n")
        return 1
    return 0


def _step_back() -> None:
    """Behind the process that started this one, which it ends with."""
    # A group, with the compiler that it runs, but not a session: Linux may share a core equally
    # among sessions, whatever their priorities.
    os.setpgid(0, 0)
    end_with_parent(partial(os.killpg, 0, signal.SIGKILL))
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    with contextlib.suppress(OSError):  # where memory ends, this process does
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
