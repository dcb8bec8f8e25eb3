"""The definition of a metric, and its Prometheus collector."""

import enum
import itertools
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Kind(enum.Enum):
    """The Prometheus metric types that hippo uses."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Label:
    """A label with either all its values, or in ``bound`` the reason why they are few."""

    name: str
    values: tuple[str, ...] = ()
    bound: str = ""


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric. ``name`` lacks the suffix ``_total`` of a counter's series."""

    name: str
    kind: Kind
    text: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def series_name(self) -> str:
        """The name in Prometheus; a histogram's series add ``_bucket``, ``_sum`` or ``_count``."""
        return self.name + "_total" if self.kind is Kind.COUNTER else self.name

    @property
    def label_names(self) -> tuple[str, ...]:
        return tuple(label.name for label in self.labels)


def counter(name: str, text: str, *labels: Label) -> Metric:
    return Metric(name, Kind.COUNTER, text, labels)


def gauge(name: str, text: str, *labels: Label) -> Metric:
    return Metric(name, Kind.GAUGE, text, labels)


def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: Label) -> Metric:
    return Metric(name, Kind.HISTOGRAM, text, labels, buckets)


def collector(metric: Metric, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    """Registers the Prometheus collector of a metric and returns it.

    A counter starts at 0 for every known label value, so that Prometheus sees its first event."""
    described = (metric.name, metric.text, metric.label_names)
    if metric.kind is Kind.HISTOGRAM:
        return Histogram(*described, buckets=metric.buckets, registry=registry)
    kind = Counter if metric.kind is Kind.COUNTER else Gauge
    made = kind(*described, registry=registry)
    if metric.kind is Kind.COUNTER and metric.labels:
        for values in itertools.product(*(label.values for label in metric.labels)):
            made.labels(*values)
    return made
