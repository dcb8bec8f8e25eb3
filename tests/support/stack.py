"""Running processes of a pair, started as ``hippo up`` does, with what is behind the gateway."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

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
            text = httpx.get(url, trust_env=False).text
        except httpx.ConnectError:
            return 0.0
        return _value(text, name + " ")

    def slots_used(self) -> float:
        """Slots in use on both services."""
        return sum(self.metric(service, "hippo_slots_used") for service in ("draft", "target"))

    def gateway_metric(self, line_start: str) -> float:
        """The value of one series of the gateway."""
        return _value(httpx.get(f"{self.url}/metrics", trust_env=False).text, line_start)


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
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _value(text: str, line_start: str) -> float:
    lines = (line for line in text.splitlines() if line.startswith(line_start))
    return next((float(line.split()[-1]) for line in lines), 0.0)
