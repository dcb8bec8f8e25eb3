"""Running processes of a pair, started as ``hippo up`` does, with what is behind the gateway."""

import itertools
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from hippo.cli.stack import Stack, StackOptions


@dataclass(frozen=True, slots=True)
class RunningStack:
    """A stack that serves, and where its services tell their metrics."""

    stack: Stack
    metrics_ports: dict[str, int]
    lines: list[str] = field(repr=False)  # what was logged, each line after its process's name

    @property
    def url(self) -> str:
        return self.stack.url

    def pids(self) -> dict[str, int]:
        """Process ids of the services and the gateway."""
        return {name: self.stack.child(name).pid for name in ("target", "draft", "gateway")}

    def metric(self, service: str, name: str) -> float:
        """The value of one metric of "draft" or "target"; 0 until it serves."""
        url = f"http://127.0.0.1:{self.metrics_ports[service]}/metrics"
        try:
            text = fetch(url).text
        except httpx.ConnectError:
            return 0.0
        return value_of(text, name + " ")

    def slots_used(self) -> float:
        """Slots in use on both services."""
        return sum(self.metric(service, "hippo_slots_used") for service in ("draft", "target"))

    def gateway_metric(self, line_start: str) -> float:
        """The value of one series of the gateway."""
        return value_of(fetch(f"{self.url}/metrics").text, line_start)


@contextmanager
def run_stack(options: StackOptions) -> Iterator[RunningStack]:
    """Starts it with metrics of both services; ready when it is given."""
    ports = {"draft": free_port(), "target": free_port()}
    options = replace(
        options,
        target_args=(*options.target_args, "--metrics-port", str(ports["target"])),
        draft_args=(*options.draft_args, "--metrics-port", str(ports["draft"])),
    )
    lines: list[str] = []
    with Stack(options, lambda name, line: lines.append(f"{name}: {line}")) as stack:
        stack.start()
        stack.wait_ready(timeout_s=200)
        yield RunningStack(stack, ports, lines)


def free_port() -> int:
    """A port that is free, and stays so: below those that the kernel gives to outgoing connections
    and for port 0, and of no other worker of pytest-xdist."""
    return next(port for port in _PORTS if _is_free(port))


def _ports() -> Iterator[int]:
    """This worker's ports, again and again, from a place that differs between processes."""
    ranges = Path("/proc/sys/net/ipv4/ip_local_port_range")  # elsewhere IANA's: from 49152 on
    first_of_kernel = int(ranges.read_text().split()[0]) if ranges.exists() else 49_152
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    ports = range(10_000 + worker, max(first_of_kernel, 20_000), num_workers)
    start = 97 * os.getpid() % len(ports)
    yield from itertools.cycle([*ports[start:], *ports[:start]])


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


_PORTS = _ports()


def fetch(url: str) -> httpx.Response:
    """A plain GET that a test may poll with: no certificates, whose reading takes 20 ms, are read
    for it."""
    return httpx.get(url, trust_env=False, verify=False)


def value_of(text: str, line_start: str) -> float:
    """The value of the first series of a metrics page that begins so; 0 for none."""
    lines = (line for line in text.splitlines() if line.startswith(line_start))
    return next((float(line.split()[-1]) for line in lines), 0.0)
