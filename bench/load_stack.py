"""A stack with room for many clients, and readings of what its processes do."""

from __future__ import annotations

import os
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from bench.load_figures import Reading, parse_samples
from bench.runs import STACK_LOG
from hippo.cli.stack import Stack, StackOptions

_TICKS = os.sysconf("SC_CLK_TCK")


class LoadStack:
    """Draft, target and gateway with ``num_slots`` slots each, and their metrics."""

    def __init__(self, stack: Stack, ports: dict[str, int]) -> None:
        self._stack = stack
        self._ports = ports

    @property
    def url(self) -> str:
        """Where the gateway listens."""
        return self._stack.url

    def read(self) -> Reading:
        """Counters of all processes now; takes some milliseconds."""
        samples = {
            name: parse_samples(_fetch(f"http://127.0.0.1:{port}/metrics"))
            for name, port in self._ports.items()
        }
        cpu_s = {
            name: session_cpu_s(self._stack.child(name).pid)
            for name in ("target", "draft", "gateway")
        }
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


def session_cpu_s(session_id: int) -> float:
    """Processor seconds of all processes of a session: a service, and its decoding workers."""
    total = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # Behind the name, which may hold spaces: state, parent, group, session, ...
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        if int(fields[3]) == session_id:
            total += int(fields[11]) + int(fields[12])
    return total / _TICKS


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        return str(response.read().decode())
