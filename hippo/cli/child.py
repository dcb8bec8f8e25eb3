"""Becomes the command given, which then ends with the process that started this one.

Run as a script, in a bare interpreter: ``python -I child.py PARENT_PID COMMAND...``. The wish to be
told of the parent's end survives the exec.
"""

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    """Never returns."""
    parent_pid, command = int(argv[0]), argv[1:]
    with contextlib.suppress(OSError, AttributeError):  # only Linux has it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:  # it ended before it could be watched
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
