"""What Prometheus is told; updated once per request, never per token."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
_STEP_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class GatewayMetrics:
    """The gateway's own registry of metrics."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "hippo_http_requests", "HTTP requests answered", ["path", "status"], registry=registry
        )
        self.completions_running = Gauge(
            "hippo_completions_running", "Completions under way", registry=registry
        )
        self.completions = Counter(
            "hippo_completions",
            "Completions ended, by policy and outcome (stop, length, cancelled, error)",
            ["policy", "outcome"],
            registry=registry,
        )
        self.prompt_tokens = Counter("hippo_prompt_tokens", "Prompt tokens read", registry=registry)
        self.completion_tokens = Counter(
            "hippo_completion_tokens", "Completion tokens settled", registry=registry
        )
        self.target_forwards = Counter(
            "hippo_target_forwards", "Forwards of the target after the prefill", registry=registry
        )
        self.draft_tokens = Counter(
            "hippo_draft_tokens", "Draft tokens verified", registry=registry
        )
        self.accepted_tokens = Counter(
            "hippo_accepted_tokens", "Draft tokens accepted", registry=registry
        )
        self.dropped_tokens = Counter(
            "hippo_dropped_tokens", "Draft tokens dropped after a rejection", registry=registry
        )
        self.mode_switches = Counter(
            "hippo_mode_switches", "Changes between the two modes", registry=registry
        )
        self.drafts_lost = Counter(
            "hippo_drafts_lost", "Times a completion lost its draft", registry=registry
        )
        self.service_up = Gauge(
            "hippo_service_up", "1 while the service is usable", ["service"], registry=registry
        )
        self.first_token_seconds = Histogram(
            "hippo_time_to_first_token_seconds",
            "From the request to its first token",
            buckets=_SECONDS,
            registry=registry,
        )
        self.output_token_seconds = Histogram(
            "hippo_time_per_output_token_seconds",
            "Mean time per token after the first, of one completion",
            buckets=_STEP_SECONDS,
            registry=registry,
        )
        self.completion_seconds = Histogram(
            "hippo_completion_duration_seconds",
            "From the request to its last token",
            buckets=_SECONDS,
            registry=registry,
        )

    def count_request(self, path: str, status: int) -> None:
        """Counts an answered HTTP request; ``path`` is the route's, not the client's."""
        self._requests.labels(path, str(status)).inc()

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self._registry)
