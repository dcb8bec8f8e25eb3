"""The definitions of all metrics, which the processes export, docs/metrics.md lists, and dashboards
and rules may query."""

from hippo.metrics.gateway import GATEWAY_METRICS
from hippo.metrics.services import SERVICE_METRICS
from hippo.metrics.spec import Kind, Label, Metric
from hippo.metrics.vllm import VLLM_METRICS

__all__ = ["GATEWAY_METRICS", "SERVICE_METRICS", "VLLM_METRICS", "Kind", "Label", "Metric"]
