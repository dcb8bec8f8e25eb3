"""What is said of one metric, and how a registry is filled from it."""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Kind(enum.Enum):
    """Prometheus's types, as far as they are used."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Label:
    """One label; either all its values are known, or ``bound`` says why they are few."""

    name: str
    values: tuple[str, ...] = ()
    bound: str = ""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. ``name`` is without the ``_total`` that a counter's series end in."""

    name: str
    kind: Kind
    text: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def series_name(self) -> str:
        """What to ask Prometheus for; a histogram's has ``_bucket``, ``_sum`` and ``_count``."""
        return self.name + "_total" if self.kind is Kind.COUNTER else self.name

    @property
    def label_names(self) -> tuple[str, ...]:
        return tuple(label.name for label in self.labels)


def counter(name: str, text: str, *labels: Label) -> Metric:
    return Metric(name, Kind.COUNTER, text, labels)


def gauge(name: str, text: str, *labels: Label) -> Metric:
    return Metric(name, Kind.GAUGE, text, labels)


def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: Label) -> Metric:
    """``buckets`` are their upper bounds."""
    return Metric(name, Kind.HISTOGRAM, text, labels, buckets)


def collector(metric: Metric, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    """What counts a metric. A counter begins at 0 for every known label value, so that its first
    event shows; series of others begin when they are set."""
    if metric.kind is Kind.HISTOGRAM:
        assert metric.buckets, metric.name
        return Histogram(
            metric.name, metric.text, metric.label_names, buckets=metric.buckets, registry=registry
        )
    kind = Counter if metric.kind is Kind.COUNTER else Gauge
    made = kind(metric.name, metric.text, metric.label_names, registry=registry)
    if metric.kind is Kind.COUNTER and metric.labels:
        for values in itertools.product(*(label.values for label in metric.labels)):
            made.labels(*values)
    return made
