"""The gateway's metrics: registries filled from hippo.metrics, written once per request.

What happened in an answer is counted when it ends (gateway/account.py), so that a round costs
nothing; only requests that run and wait are counted as they come and go.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from gateway.baseline import Baseline
from hippo.metrics import gateway as own
from hippo.metrics import vllm
from hippo.metrics.spec import Metric, collector
from hippo.types import PROTOCOL_VERSION


class ModelMetrics:
    """vLLM's metrics for one served model; ``metrics[vllm.NAME]`` is the series of the model."""

    def __init__(self, made: Mapping[Metric, Any], name: str, *, max_draft_tokens: int) -> None:
        of_all = [metric for metric in made if metric.label_names == (vllm.MODEL_NAME.name,)]
        self._series = {metric: made[metric].labels(name) for metric in of_all}
        ended, accepted = made[vllm.REQUEST_SUCCESS], made[vllm.NUM_ACCEPTED_TOKENS_PER_POS]
        self.ended = {reason: ended.labels(name, reason) for reason in vllm.FINISHED_REASONS}
        positions = range(max_draft_tokens)
        self.accepted_per_position = [accepted.labels(name, str(place)) for place in positions]

    def __getitem__(self, metric: Metric) -> Any:
        return self._series[metric]


class GatewayMetrics:
    """The gateway's own registry; event loop only. ``metrics[own.NAME]`` is a metric's collector.

    ``max_draft_tokens`` bounds the label ``position``.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, *, max_draft_tokens: int, version: str) -> None:
        self._max_draft_tokens = max_draft_tokens
        self._models: dict[str, ModelMetrics] = {}
        # Clients that look for a counter by a part of its name, as `vllm bench serve` does, would
        # add the time stamps of `_created` series to it.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        registry = self._registry = CollectorRegistry()
        self._made = {
            metric: collector(metric, registry)
            for metric in (*own.GATEWAY_METRICS, *vllm.VLLM_METRICS)
            if metric is not vllm.TIME_PER_OUTPUT_TOKEN
        }
        self[own.BUILD_INFO].labels(version, str(PROTOCOL_VERSION)).set(1)
        registry.register(_OlderName(self[vllm.INTER_TOKEN_LATENCY]))
        ProcessCollector(registry=registry)

    def __getitem__(self, metric: Metric) -> Any:
        return self._made[metric]

    def count_request(self, path: str, status: int) -> None:
        """Counts an answered HTTP request; ``path`` is the route's, not the client's."""
        self[own.HTTP_REQUESTS].labels(path, str(status)).inc()

    def model(self, name: str) -> ModelMetrics:
        """The series of the served model; they begin at 0 with the first call."""
        if name not in self._models:
            self._models[name] = ModelMetrics(
                self._made, name, max_draft_tokens=self._max_draft_tokens
            )
        return self._models[name]

    def tell_baseline(self, address: str, baseline: Baseline) -> None:
        """What is known of a target now; no step times and no age before anything is."""
        self[own.BASELINE_STEPS].labels(address)  # is there from the start
        for bound, seconds in baseline.known_steps():
            self[own.BASELINE_STEP].labels(address, bound).set(seconds)
        if baseline.is_known:
            age_s = (time.monotonic_ns() - baseline.learnt_ns) / 1e9
            self[own.BASELINE_AGE].labels(address).set(age_s)

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self._registry)


class _OlderName(Collector):
    """The times between verdicts once more, under the name that older dashboards read."""

    def __init__(self, newer: Histogram) -> None:
        self._newer = newer

    def collect(self) -> Iterator[Family]:
        metric = vllm.TIME_PER_OUTPUT_TOKEN
        family = HistogramMetricFamily(metric.name, metric.text)
        for sample in next(iter(self._newer.collect())).samples:
            suffix = sample.name.removeprefix(vllm.INTER_TOKEN_LATENCY.name)
            family.add_sample(metric.name + suffix, sample.labels, sample.value)
        yield family
