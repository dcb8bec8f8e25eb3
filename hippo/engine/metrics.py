"""Prometheus metrics of an engine, read from its counters when they are asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from hippo.engine.stats import FORWARD_BUCKETS_SECONDS, EngineStats
from hippo.errors import UnavailableError


class EngineCollector(Collector):
    """Turns ``stats`` into metrics; none while the model loads."""

    def __init__(self, stats: Callable[[], EngineStats | None]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        if stats is None:
            return
        counters = stats.counters
        for name, text, value in (
            ("hippo_slots", "Cache slots.", stats.num_slots),
            ("hippo_slots_used", "Cache slots in use.", stats.num_slots_used),
            ("hippo_queue_length", "Sequences that wait for a slot.", stats.num_waiting),
            ("hippo_streams", "Open streams.", stats.num_streams),
        ):
            yield GaugeMetricFamily(name, text, value=value)
        for name, text, total in (
            ("hippo_sequences", "Sequences begun.", counters.num_opened),
            (
                "hippo_sequence_failures",
                "Sequences ended by an internal error.",
                counters.num_failed,
            ),
            ("hippo_prefills", "Prefills finished.", counters.num_prefills),
            ("hippo_rows", "Rows of all decoding forwards.", counters.num_rows),
            ("hippo_prefill_seconds", "Device time of prefills.", counters.prefill_ns / 1e9),
            ("hippo_idle_seconds", "Time the device thread slept.", counters.idle_ns / 1e9),
            (
                "hippo_busy_seconds",
                "Device time of prefills and forwards.",
                (counters.prefill_ns + counters.forward_ns) / 1e9,
            ),
        ):
            yield CounterMetricFamily(name, text, value=total)
        yield _forward_histogram(list(counters.forward_counts), counters.forward_ns / 1e9)


def _forward_histogram(counts: list[int], sum_seconds: float) -> HistogramMetricFamily:
    buckets: list[tuple[str, float]] = []
    total = 0
    labels = [*map(str, FORWARD_BUCKETS_SECONDS), "+Inf"]
    for label, count in zip(labels, counts, strict=True):
        total += count
        buckets.append((label, total))
    return HistogramMetricFamily(
        "hippo_forward_seconds",
        "Device time of one decoding forward, sampling included.",
        buckets=buckets,
        sum_value=sum_seconds,
    )


@dataclass(frozen=True, slots=True)
class MetricsServer:
    """A running endpoint."""

    server: WSGIServer
    thread: threading.Thread

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    @property
    def port(self) -> int:
        return self.server.server_port


def start_metrics(
    stats: Callable[[], EngineStats | None], *, host: str, port: int
) -> MetricsServer:
    """Serves /metrics; raises UnavailableError when the port is taken."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(stats))
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise UnavailableError(
            f"cannot serve metrics on {host}:{port}: {error.strerror}; choose another port with "
            "--metrics-port"
        ) from None
    return MetricsServer(server, thread)
