"""The gateway's metrics: registries filled from hippo.metrics, written once per request.

What happened in an answer is counted when it ends (gateway/account.py), so that a round costs
nothing; only requests that run and wait are counted as they come and go.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from gateway.baseline import Baseline
from hippo.metrics import gateway as own
from hippo.metrics import vllm
from hippo.metrics.spec import WithoutCreated, counter, gauge, histogram


@dataclass(frozen=True, slots=True)
class ModelMetrics:
    """vLLM's metrics for one served model."""

    num_running: Gauge
    num_waiting: Gauge
    prompt_tokens: Counter
    prefix_cache_queries: Counter
    prefix_cache_hits: Counter
    generation_tokens: Counter
    ended: dict[str, Counter]  # by finished_reason
    num_drafts: Counter
    num_draft_tokens: Counter
    num_accepted_tokens: Counter
    accepted_per_position: Sequence[Counter]
    time_to_first_token: Histogram
    inter_token_latency: Histogram
    request_time_per_output_token: Histogram
    e2e_request_latency: Histogram
    request_queue_time: Histogram
    request_prefill_time: Histogram
    request_decode_time: Histogram
    request_prompt_tokens: Histogram
    request_generation_tokens: Histogram


class GatewayMetrics:
    """The gateway's own registry; event loop only.

    ``max_draft_tokens`` bounds the label ``position``; ``baselines``, by the target's address,
    are read when they are rendered.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(
        self,
        baselines: Mapping[str, Baseline],
        *,
        max_draft_tokens: int,
        version: str,
        protocol_version: int,
    ) -> None:
        self._max_draft_tokens = max_draft_tokens
        self._models: dict[str, ModelMetrics] = {}
        registry = CollectorRegistry()
        self._add_vllm(registry)
        self.http_requests = counter(own.HTTP_REQUESTS, registry)
        self.completions = counter(own.COMPLETIONS, registry)
        self.calibrations = counter(own.CALIBRATIONS, registry)
        self.decode_time = counter(own.DECODE_TIME, registry)
        self.decode_baseline = counter(own.DECODE_BASELINE, registry)
        self.first_token_time = counter(own.FIRST_TOKEN_TIME, registry)
        self.request_speedup = histogram(own.REQUEST_SPEEDUP, registry)
        self.mode_time = counter(own.MODE_TIME, registry)
        self.mode_switches = counter(own.MODE_SWITCHES, registry)
        self.busy_time = counter(own.BUSY_TIME, registry)
        self.wait_time = counter(own.WAIT_TIME, registry)
        self.target_forwards = counter(own.TARGET_FORWARDS, registry)
        self.blocks = counter(own.BLOCKS, registry)
        self.stale_blocks = counter(own.STALE_BLOCKS, registry)
        self.drafted_tokens = counter(own.DRAFTED_TOKENS, registry)
        self.wasted_tokens = counter(own.WASTED_TOKENS, registry)
        self.run_length = histogram(own.RUN_LENGTH, registry)
        self.first_block_delay = histogram(own.FIRST_BLOCK_DELAY, registry)
        self.visual_tokens = counter(own.VISUAL_TOKENS, registry)
        self.round_transport = histogram(own.ROUND_TRANSPORT, registry)
        self.draft_losses = counter(own.DRAFT_LOSSES, registry)
        self.draft_recoveries = counter(own.DRAFT_RECOVERIES, registry)
        self.service_up = gauge(own.SERVICE_UP, registry)
        self.services_ready = gauge(own.SERVICES_READY, registry)
        build_info = gauge(own.BUILD_INFO, registry)
        build_info.labels(version, str(protocol_version)).set(1)
        self._shown = CollectorRegistry()
        self._shown.register(
            WithoutCreated(
                [registry, _OlderName(self._inter_token_latency), _OfBaselines(baselines)]
            )
        )
        ProcessCollector(registry=self._shown)

    def count_request(self, path: str, status: int) -> None:
        """Counts an answered HTTP request; ``path`` is the route's, not the client's."""
        self.http_requests.labels(path, str(status)).inc()

    def model(self, name: str) -> ModelMetrics:
        """The series of the served model; they begin at 0 with the first call."""
        if name not in self._models:
            self._models[name] = self._of_model(name)
        return self._models[name]

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self._shown)

    def _add_vllm(self, registry: CollectorRegistry) -> None:
        self._num_running = gauge(vllm.NUM_REQUESTS_RUNNING, registry)
        self._num_waiting = gauge(vllm.NUM_REQUESTS_WAITING, registry)
        self._prompt_tokens = counter(vllm.NUM_PROMPT_TOKENS, registry)
        self._prefix_cache_queries = counter(vllm.PREFIX_CACHE_QUERIES, registry)
        self._prefix_cache_hits = counter(vllm.PREFIX_CACHE_HITS, registry)
        self._generation_tokens = counter(vllm.NUM_GENERATION_TOKENS, registry)
        self._ended = counter(vllm.REQUEST_SUCCESS, registry)
        self._num_drafts = counter(vllm.NUM_DRAFTS, registry)
        self._num_draft_tokens = counter(vllm.NUM_DRAFT_TOKENS, registry)
        self._num_accepted_tokens = counter(vllm.NUM_ACCEPTED_TOKENS, registry)
        self._accepted_per_position = counter(vllm.NUM_ACCEPTED_TOKENS_PER_POS, registry)
        self._time_to_first_token = histogram(vllm.TIME_TO_FIRST_TOKEN, registry)
        self._inter_token_latency = histogram(vllm.INTER_TOKEN_LATENCY, registry)
        self._time_per_output_token = histogram(vllm.REQUEST_TIME_PER_OUTPUT_TOKEN, registry)
        self._e2e_request_latency = histogram(vllm.E2E_REQUEST_LATENCY, registry)
        self._queue_time = histogram(vllm.REQUEST_QUEUE_TIME, registry)
        self._prefill_time = histogram(vllm.REQUEST_PREFILL_TIME, registry)
        self._decode_time = histogram(vllm.REQUEST_DECODE_TIME, registry)
        self._request_prompt_tokens = histogram(vllm.REQUEST_PROMPT_TOKENS, registry)
        self._request_generation_tokens = histogram(vllm.REQUEST_GENERATION_TOKENS, registry)

    def _of_model(self, name: str) -> ModelMetrics:
        return ModelMetrics(
            num_running=self._num_running.labels(name),
            num_waiting=self._num_waiting.labels(name),
            prompt_tokens=self._prompt_tokens.labels(name),
            prefix_cache_queries=self._prefix_cache_queries.labels(name),
            prefix_cache_hits=self._prefix_cache_hits.labels(name),
            generation_tokens=self._generation_tokens.labels(name),
            ended={reason: self._ended.labels(name, reason) for reason in vllm.FINISHED_REASONS},
            num_drafts=self._num_drafts.labels(name),
            num_draft_tokens=self._num_draft_tokens.labels(name),
            num_accepted_tokens=self._num_accepted_tokens.labels(name),
            accepted_per_position=[
                self._accepted_per_position.labels(name, str(position))
                for position in range(self._max_draft_tokens)
            ],
            time_to_first_token=self._time_to_first_token.labels(name),
            inter_token_latency=self._inter_token_latency.labels(name),
            request_time_per_output_token=self._time_per_output_token.labels(name),
            e2e_request_latency=self._e2e_request_latency.labels(name),
            request_queue_time=self._queue_time.labels(name),
            request_prefill_time=self._prefill_time.labels(name),
            request_decode_time=self._decode_time.labels(name),
            request_prompt_tokens=self._request_prompt_tokens.labels(name),
            request_generation_tokens=self._request_generation_tokens.labels(name),
        )


class _OfBaselines(Collector):
    """What is known of each target; no step times and no age before anything is."""

    def __init__(self, baselines: Mapping[str, Baseline]) -> None:
        self._baselines = baselines

    def collect(self) -> Iterator[Family]:
        counted = CounterMetricFamily(
            own.BASELINE_STEPS.name, own.BASELINE_STEPS.text, labels=own.BASELINE_STEPS.label_names
        )
        steps = GaugeMetricFamily(
            own.BASELINE_STEP.name, own.BASELINE_STEP.text, labels=own.BASELINE_STEP.label_names
        )
        ages = GaugeMetricFamily(
            own.BASELINE_AGE.name, own.BASELINE_AGE.text, labels=own.BASELINE_AGE.label_names
        )
        for address, baseline in self._baselines.items():
            counted.add_metric([address], baseline.num_steps)
            for bound, seconds in baseline.known_steps():
                steps.add_metric([address, bound], seconds)
            if baseline.is_known:
                ages.add_metric([address], (time.monotonic_ns() - baseline.learnt_ns) / 1e9)
        yield from (family for family in (counted, steps, ages) if family.samples)


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
