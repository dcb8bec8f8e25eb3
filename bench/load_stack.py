"""A stack with room for many clients, and readings of what its processes do."""

from __future__ import annotations

import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import psutil

from bench.load_figures import Reading, parse_samples
from bench.runs import STACK_LOG
from hippo.cli.stack import Stack, StackOptions


class LoadStack:
    """Draft, target and gateway with ``num_slots`` slots each, and their metrics."""

    def __init__(self, stack: Stack, ports: dict[str, int]) -> None:
        self.stack = stack
        self._ports = ports

    @property
    def url(self) -> str:
        """Where the gateway listens."""
        return self.stack.url

    def pids(self) -> dict[str, int]:
        """Process ids of the services and the gateway; each leads a session of its own."""
        return {name: self.stack.child(name).pid for name in ("target", "draft", "gateway")}

    def metrics(self) -> dict[str, str]:
        """What the two services expose."""
        return {name: self.metrics_of(name) for name in self._ports}

    def metrics_of(self, name: str) -> str:
        """What one of them, "target" or "draft", exposes."""
        return _fetch(f"http://127.0.0.1:{self._ports[name]}/metrics")

    def read(self) -> Reading:
        """Counters of all processes now; takes some milliseconds."""
        samples = {name: parse_samples(text) for name, text in self.metrics().items()}
        cpu_s = {name: tree_cpu_s(pid) for name, pid in self.pids().items()}
        return Reading(time.perf_counter(), samples, {**cpu_s, "clients": time.process_time()})


@contextmanager
def load_stack(options: StackOptions, *, num_slots: int) -> Iterator[LoadStack]:
    """Starts it with its models warm; its log goes to bench/out/stack.log."""
    ports = {"target": _free_port(), "draft": _free_port()}
    slots = ("--slots", str(num_slots))
    options = replace(
        options,
        target_args=(*options.target_args, *slots, "--metrics-port", str(ports["target"])),
        draft_args=(*options.draft_args, *slots, "--metrics-port", str(ports["draft"])),
    )
    STACK_LOG.parent.mkdir(parents=True, exist_ok=True)
    with STACK_LOG.open("a", encoding="utf-8") as log:

        def write(name: str, line: str) -> None:
            log.write(f"{name}: {line}\n")

        with Stack(options, write) as stack:
            stack.start()
            stack.wait_ready()
            yield LoadStack(stack, ports)


def tree_cpu_s(pid: int) -> float:
    """Processor seconds so far of a process and those that it started."""
    seconds = 0.0
    with suppress(psutil.Error):  # it has just ended
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
