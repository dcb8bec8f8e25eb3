"""Resident memory of the services, and how fast it grows."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from bench.processes import session_processes

_PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 1e6


@dataclass(frozen=True, slots=True)
class Sample:
    """Megabytes of a service and of the processes that it started, at a moment of the soak."""

    at_s: float
    pid: int
    resident_mb: float


def session_mb(session_id: int) -> float:
    """Resident memory of all processes of a session, in MB; what they share counts in each."""
    pages = 0
    for path in session_processes(session_id):
        with suppress(OSError):  # it has just ended
            pages += int((path / "statm").read_text().split()[1])
    return pages * _PAGE_MB


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
            sample = Sample(time.monotonic() - began_s, pid, session_mb(pid))
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
