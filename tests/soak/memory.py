"""Resident memory of the services, and how fast it grows."""

import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.answers.memory import process_megabytes


@dataclass(frozen=True, slots=True)
class Sample:
    """Megabytes of a service and of the processes that it started, at a moment of the soak."""

    at_s: float
    pid: int
    resident_mb: float


def tree_mb(pid: int, field: str = "VmRSS") -> float:
    """Resident memory of a process and those that it started, in MB; what they share counts in
    each. With the field VmHWM: the most of each."""
    with suppress(psutil.Error, OSError):  # it has just ended
        return sum(process_megabytes({"": pid}, [field]).values())
    return 0.0


def reset_peaks(pid: int) -> None:
    """The most resident memory counts from now on."""
    with suppress(psutil.Error, OSError):  # it has just ended
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")


def watch_memory(
    pids: Callable[[], Mapping[str, int]],
    stop: threading.Event,
    samples: dict[str, list[Sample]],
    *,
    every_s: float = 5.0,
) -> None:
    """Samples each service until ``stop``."""
    began_s = time.monotonic()
    while not stop.wait(every_s):
        for name, pid in pids().items():
            sample = Sample(time.monotonic() - began_s, pid, tree_mb(pid))
            samples.setdefault(name, []).append(sample)


def growth_mb_a_minute(samples: Sequence[Sample], *, after_s: float) -> float | None:
    """Slope by least squares over the last process' samples from ``after_s`` seconds of its life
    on; None with fewer than 10 of them."""
    last = [each for each in samples if each.pid == samples[-1].pid] if samples else []
    counted = [each for each in last if each.at_s >= last[0].at_s + after_s]
    if len(counted) < 10:
        return None
    at_min = [each.at_s / 60 for each in counted]
    return statistics.linear_regression(at_min, [each.resident_mb for each in counted]).slope
