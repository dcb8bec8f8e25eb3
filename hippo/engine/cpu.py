"""CPU affinity of a process, and the number of threads that torch uses in it."""

import contextlib
import os
import threading
from pathlib import Path

import torch

from hippo.errors import HippoError


def prepare_cpu(core: int | None, num_threads: int | None) -> None:
    """Pins all threads to ``core``, which later threads inherit, and sets torch's thread count.

    A pinned process uses one torch thread. Raises HippoError if ``core`` is not allowed.
    """
    if core is not None:
        try:
            for thread in Path("/proc/self/task").iterdir():
                os.sched_setaffinity(int(thread.name), {core})
        except (OSError, ValueError, OverflowError):
            cores = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
            raise HippoError(f"--cpu-core {core}: this process may run on cores {cores}") from None
        torch.set_num_threads(1)
    elif num_threads is not None:
        torch.set_num_threads(num_threads)


def set_threads_here(num_threads: int) -> None:
    """Sets how many threads torch uses for operations of the calling thread only."""
    torch.get_num_threads()  # first, because a thread's first call resets its number
    torch.set_num_threads(num_threads)


def compute_alone() -> None:
    """Makes torch use no other thread for operations of the calling thread; for threads that run
    beside the device thread of a CPU.

    Each calling thread with several torch threads has an OpenMP team of its own. With more threads
    than cores in all teams, OpenMP stops spinning, and the device thread must wake its team for
    every operation: two threads on two cores were half as fast as one.
    """
    set_threads_here(1)


def name_thread(name: str) -> None:
    """Names the calling thread for ``top -H`` and /proc; has no effect outside Linux."""
    with contextlib.suppress(OSError):
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
