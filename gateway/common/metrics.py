"""The gateway's Prometheus metrics, created from the specifications in hippo.metrics.

An answer is added to the metrics when it ends (gateway/answer/account.py), so that rounds pay
nothing for metrics; only the gauges of running and waiting requests are updated at once.
"""

import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from gateway.common.baseline import Baseline
from hippo.metrics import gateway as own
from hippo.metrics import vllm
from hippo.metrics.spec import Metric, collector
from hippo.types import PROTOCOL_VERSION
from hippo.version import distribution_version


class ModelMetrics:
    """vLLM's metrics of one served model; ``metrics[vllm.NAME]`` is the model's series."""

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
    """The gateway's registry; ``metrics[own.NAME]`` is the collector of a metric.

    Use it on the event loop only. ``max_draft_tokens`` bounds the label ``position``.
    """

    def __init__(self, *, max_draft_tokens: int) -> None:
        self._max_draft_tokens = max_draft_tokens
        self._models: dict[str, ModelMetrics] = {}
        # `vllm bench serve` finds counters by a part of their names, and would add the time stamps
        # of `_created` series to them.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        registry = self._registry = CollectorRegistry()
        self._made = {
            metric: collector(metric, registry)
            for metric in (*own.GATEWAY_METRICS, *vllm.VLLM_METRICS)
            if metric is not vllm.TIME_PER_OUTPUT_TOKEN
        }
        self[own.BUILD_INFO].labels(distribution_version(), str(PROTOCOL_VERSION)).set(1)
        registry.register(_OlderName(self[vllm.INTER_TOKEN_LATENCY]))
        ProcessCollector(registry=registry)

    def __getitem__(self, metric: Metric) -> Any:
        return self._made[metric]

    def count_request(self, path: str, status: int) -> None:
        """Counts an answered HTTP request; ``path`` is the path of the route, not of the URL."""
        self[own.HTTP_REQUESTS].labels(path, str(status)).inc()

    def model(self, name: str) -> ModelMetrics:
        """Returns the series of a served model; the first call creates them, with value 0."""
        if name not in self._models:
            self._models[name] = ModelMetrics(
                self._made, name, max_draft_tokens=self._max_draft_tokens
            )
        return self._models[name]

    def set_baseline(self, address: str, baseline: Baseline) -> None:
        """Sets the gauges of a target's baseline; before the first measurement there are none."""
        self[own.BASELINE_STEPS].labels(address)  # creates the series
        for bound, seconds in baseline.known_steps():
            self[own.BASELINE_STEP].labels(address, bound).set(seconds)
        if baseline.is_known:
            age_s = (time.monotonic_ns() - baseline.learnt_ns) / 1e9
            self[own.BASELINE_AGE].labels(address).set(age_s)

    def keep_targets(self, addresses: Collection[str]) -> None:
        """Removes the series of all other targets."""
        for metric in (own.BASELINE_STEPS, own.BASELINE_STEP, own.BASELINE_AGE):
            made = self[metric]
            known = {
                sample.labels[own.TARGET.name] for sample in next(iter(made.collect())).samples
            }
            for address in known.difference(addresses):
                made.remove_by_labels({own.TARGET.name: address})

    def render(self, accept: str) -> tuple[bytes, str]:
        """Returns all metrics and their content type: OpenMetrics, which has exemplars, for a
        scraper whose header ``accept`` asks for it, and otherwise Prometheus' text format."""
        if "application/openmetrics-text" in accept:
            # The default way of escaping replaces the colon in vLLM's names.
            content: bytes = openmetrics.generate_latest(  # type: ignore[no-untyped-call]
                self._registry, escaping=openmetrics.ALLOWUTF8
            )
            return content, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(self._registry), CONTENT_TYPE_LATEST


class _OlderName(Collector):
    """A copy of the inter-token latency under the name that older dashboards read."""

    def __init__(self, newer: Histogram) -> None:
        self._newer = newer

    def collect(self) -> Iterator[Family]:
        metric = vllm.TIME_PER_OUTPUT_TOKEN
        family = HistogramMetricFamily(metric.name, metric.text)
        for sample in next(iter(self._newer.collect())).samples:
            suffix = sample.name.removeprefix(vllm.INTER_TOKEN_LATENCY.name)
            family.add_sample(metric.name + suffix, sample.labels, sample.value)
        yield family
