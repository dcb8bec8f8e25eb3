"""Which core a process runs on, and how many threads torch uses in it."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import torch

from hippo.errors import HippoError


def prepare_cpu(core: int | None, num_threads: int | None) -> None:
    """Pins every thread there is, and so all that come, and sizes torch's thread pool.

    A pinned process has one thread. Raises HippoError for a core that it may not run on.
    """
    if core is not None:
        try:
            for thread in Path("/proc/self/task").iterdir():
                os.sched_setaffinity(int(thread.name), {core})
        except OSError:
            cores = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
            raise HippoError(f"--cpu-core {core}: this process may run on cores {cores}") from None
        torch.set_num_threads(1)
    elif num_threads is not None:
        torch.set_num_threads(num_threads)


def set_threads_here(num_threads: int) -> None:
    """How many threads torch's operations of this thread use, whatever those of others do."""
    torch.get_num_threads()  # a thread takes the process's number when it is first asked for one
    torch.set_num_threads(num_threads)


def compute_alone() -> None:
    """Has torch compute in this thread alone, for threads that run beside a CPU's device thread.

    Each thread that computes with several has a team of them. With more of these in a process than
    cores, idle or not, OpenMP waits for none by spinning, and every operation of the device thread
    begins by waking its team: two threads on two cores were half as fast as one.
    """
    set_threads_here(1)


def name_thread(name: str) -> None:
    """Gives the calling thread a name for ``top -H`` and /proc, where the system has such names."""
    with contextlib.suppress(OSError):
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
