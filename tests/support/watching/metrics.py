"""What a process exports against what hippo.metrics declares."""

from collections.abc import Iterable

from prometheus_client.parser import text_string_to_metric_families

from hippo.metrics import Metric


def check_exported(text: str, metrics: Iterable[Metric]) -> None:
    """Asserts that a scrape holds these metrics, as they are declared, and no others."""
    families = {
        family.name: family
        for family in text_string_to_metric_families(text)
        if not family.name.startswith("process_")
    }
    declared = {metric.name: metric for metric in metrics}
    assert set(families) == set(declared)
    for name, family in families.items():
        assert family.type == declared[name].kind.value, name
        assert family.documentation == declared[name].text, name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert labels == set(declared[name].label_names), name
