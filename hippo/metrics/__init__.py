"""Every metric by name, kind, unit, labels and meaning: what the processes export, what
docs/metrics.md says, and what dashboards and rules may ask for."""

from hippo.metrics.gateway import GATEWAY_METRICS
from hippo.metrics.services import SERVICE_METRICS
from hippo.metrics.spec import Kind, Label, Metric
from hippo.metrics.vllm import VLLM_METRICS

__all__ = ["GATEWAY_METRICS", "SERVICE_METRICS", "VLLM_METRICS", "Kind", "Label", "Metric"]
