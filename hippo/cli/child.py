"""Replaces itself with a command that receives SIGTERM when the parent process ends.

Runs as a script in a bare interpreter: ``python -I child.py PARENT_PID COMMAND...``. The kernel
keeps the parent-death signal (``prctl(PR_SET_PDEATHSIG)``) across the exec.
"""

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    parent_pid, command = int(argv[0]), argv[1:]
    with contextlib.suppress(OSError, AttributeError):  # only Linux has it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:  # the parent ended before prctl() took effect
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
