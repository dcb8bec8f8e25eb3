"""A stack with slots for many clients, and readings of its processes' counters."""

from __future__ import annotations

import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import psutil

from bench.answers.runs import running_stack
from bench.load.figures import Reading, parse_samples
from hippo.cli.stack import Stack, StackOptions


class LoadStack:
    """A running stack and the metrics of its services."""

    def __init__(self, stack: Stack, ports: dict[str, int]) -> None:
        self.stack = stack
        self._ports = ports

    @property
    def url(self) -> str:
        """The gateway's address."""
        return self.stack.url

    def pids(self) -> dict[str, int]:
        """Returns the process ids of services and gateway."""
        return {name: self.stack.child(name).pid for name in ("target", "draft", "gateway")}

    def read_counters(self) -> Reading:
        """Returns the counters of all processes now; takes some milliseconds."""
        samples = {
            name: parse_samples(_fetch(f"http://127.0.0.1:{port}/metrics"))
            for name, port in self._ports.items()
        }
        cpu_s = {name: tree_cpu_s(pid) for name, pid in self.pids().items()}
        return Reading(time.perf_counter(), samples, {**cpu_s, "clients": time.process_time()})


@contextmanager
def load_stack(options: StackOptions, *, num_slots: int) -> Iterator[LoadStack]:
    """Starts a stack with ``num_slots`` slots; its log goes to bench/out/stack.log."""
    ports = {"target": _free_port(), "draft": _free_port()}
    slots = ("--slots", str(num_slots))
    options = replace(
        options,
        target_args=(*options.target_args, *slots, "--metrics-port", str(ports["target"])),
        draft_args=(*options.draft_args, *slots, "--metrics-port", str(ports["draft"])),
    )
    with running_stack(options) as stack:
        yield LoadStack(stack, ports)


def tree_cpu_s(pid: int) -> float:
    """Returns the processor seconds so far of a process and its descendants."""
    seconds = 0.0
    with suppress(psutil.Error):  # the process has just ended
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            with suppress(psutil.Error):
                times = process.cpu_times()
                seconds += times.user + times.system
    return seconds


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        return str(response.read().decode())
