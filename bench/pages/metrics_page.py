"""Rewrites the tables of docs/metrics.md: ``python -m bench.pages.metrics_page``."""

from collections.abc import Sequence

from bench.base.environment import ROOT
from bench.pages.markers import between_markers
from hippo.metrics import GATEWAY_METRICS, SERVICE_METRICS, VLLM_METRICS
from hippo.metrics.spec import Kind, Label, Metric
from hippo.metrics.vllm import MODEL_NAME

PAGE = ROOT / "docs/metrics.md"
_TABLES: dict[str, tuple[Metric, ...]] = {
    "vllm": VLLM_METRICS,
    "gateway": GATEWAY_METRICS,
    "services": SERVICE_METRICS,
}


def with_tables(text: str) -> str:
    """Returns the page with new tables. Raises ValueError if a table's markers are missing."""
    for name, metrics in _TABLES.items():
        text = between_markers(text, name, _table(metrics))
    return text


def _table(metrics: Sequence[Metric]) -> str:
    lines = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for metric in metrics:
        # The page says once that all of vLLM's metrics have the model's name.
        labels = "; ".join(_label(each) for each in metric.labels if each != MODEL_NAME)
        lines.append(f"| `{metric.series_name}` | {_kind(metric)} | {labels} | {metric.text} |")
    return "\n".join(lines) + "\n"


def _label(label: Label) -> str:
    values = ", ".join(f"`{value}`" for value in label.values) or label.bound
    return f"`{label.name}`: {values}"


def _kind(metric: Metric) -> str:
    if metric.kind is not Kind.HISTOGRAM:
        return str(metric.kind.value)
    return f"histogram, {metric.buckets[0]:g} to {metric.buckets[-1]:g}"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
