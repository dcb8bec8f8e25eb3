"""Prometheus metrics of an engine, computed from its counters at each scrape."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol
from wsgiref.simple_server import WSGIServer

import psutil
import torch
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.core import Metric as Family
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from hippo.errors import UnavailableError
from hippo.metrics import services as own
from hippo.models.loading.memory import cgroup_value
from hippo.service.backend import Backend


class Measured(Protocol):
    """The service whose figures are told."""

    num_streams: int

    @property
    def backend(self) -> Backend | None:
        """None while the model loads."""


class EngineCollector(Collector):
    """Yields a service's counters as metrics; yields none while the model loads."""

    def __init__(self, service: Measured) -> None:
        self._service = service

    def collect(self) -> Iterator[Family]:
        backend = self._service.backend
        if backend is None:
            return
        counters, model, slots = backend.engine.counters, backend.info, backend.slots
        vision, media = backend.engine.vision_cache, backend.prompts.media_cache
        memory_used, memory_total = _device_memory(torch.device(model.device))
        for metric, value in (
            (own.SLOTS, slots.num_slots),
            (own.SLOTS_USED, slots.num_used),
            (own.QUEUE_LENGTH, slots.num_waiting),
            (own.QUEUE_CAPACITY, slots.max_waiting),
            (own.STREAMS, self._service.num_streams),
            (own.VISION_CACHE_USED, vision.num_bytes),
            (own.VISION_CACHE_CAPACITY, vision.max_bytes),
            (own.MEDIA_CACHE_USED, media.num_bytes),
            (own.MEDIA_CACHE_CAPACITY, media.max_bytes),
            (own.MEMORY_USED, memory_used),
            (own.MEMORY_TOTAL, memory_total),
        ):
            yield GaugeMetricFamily(metric.name, metric.text, value=value)
        for metric, total in (
            (own.SEQUENCES, counters.num_opened),
            (own.SEQUENCE_FAILURES, counters.num_failed),
            (own.PREFILLS, counters.num_prefills),
            (own.ROWS, counters.num_rows),
            (own.FORWARD_SEQUENCES, counters.num_stepped),
            (own.PREFIX_HITS, counters.num_prefix_hits),
            (own.PREFIX_MISSES, counters.num_prefills - counters.num_prefix_hits),
            (own.PREFILL_ROWS, counters.num_prompt_rows),
            (own.REUSED_ROWS, counters.num_reused_rows),
            (own.HELPED_PREFILLS, counters.num_helped),
            (own.HELPED_ROWS, counters.helped_rows),
            (own.SAVED_TIME, counters.saved_ns / 1e9),
            (own.VISION_CACHE_HITS, vision.num_hits),
            (own.VISION_CACHE_MISSES, vision.num_misses),
            (own.MEDIA_CACHE_HITS, media.num_hits),
            (own.MEDIA_CACHE_MISSES, media.num_misses),
            (own.PREFILL_TIME, counters.prefill_ns / 1e9),
            (own.BUSY_TIME, (counters.prefill_ns + counters.forward_ns) / 1e9),
            (own.IDLE_TIME, counters.idle_ns / 1e9),
        ):
            yield CounterMetricFamily(metric.name, metric.text, value=total)
        yield _forward_histogram(list(counters.forward_counts), counters.forward_ns / 1e9)
        info = own.MODEL_INFO
        family = GaugeMetricFamily(info.name, info.text, labels=info.label_names)
        family.add_metric([model.name, model.family, model.device, model.dtype], 1)
        yield family


def _device_memory(device: torch.device) -> tuple[int, int]:
    """Returns used and total bytes: on a GPU as the driver reports them; on a CPU the bytes of
    this process, and the lower limit of machine and cgroup."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(total - free), int(total)
    total = int(psutil.virtual_memory().total)
    limit = cgroup_value("memory.max")
    return int(psutil.Process().memory_info().rss), total if limit is None else min(total, limit)


def _forward_histogram(counts: list[int], sum_seconds: float) -> HistogramMetricFamily:
    metric = own.FORWARD_TIME
    buckets: list[tuple[str, float]] = []
    total = 0
    labels = [*map(str, metric.buckets), "+Inf"]
    for label, count in zip(labels, counts, strict=True):
        total += count
        buckets.append((label, total))
    return HistogramMetricFamily(metric.name, metric.text, buckets=buckets, sum_value=sum_seconds)


@dataclass(frozen=True, slots=True)
class MetricsServer:
    """A running /metrics endpoint."""

    server: WSGIServer
    thread: threading.Thread

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    @property
    def port(self) -> int:
        return self.server.server_port


def start_metrics(service: Measured, *, host: str, port: int) -> MetricsServer:
    """Serves /metrics; raises UnavailableError if the port cannot be bound."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(service))
    ProcessCollector(registry=registry)
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise UnavailableError(
            f"cannot serve metrics on {host}:{port}: {error.strerror}; choose another port with "
            "--metrics-port"
        ) from None
    return MetricsServer(server, thread)
