"""Dashboards, rules and docs against the metrics that there are."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from hippo.cli import doctor
from hippo.metrics import GATEWAY_METRICS, SERVICE_METRICS, VLLM_METRICS, Kind
from tests.support.watching.dashboards import FOLDER, PANELS, Panel, dashboards

ROOT = Path(__file__).resolve().parents[3]
PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES = yaml.safe_load((PROMETHEUS / "rules" / "hippo.yml").read_text())["groups"]
ALERTS = [rule for group in RULES for rule in group["rules"] if "alert" in rule]
_OTHERS = {"up", "process_resident_memory_bytes", "process_cpu_seconds_total"}
_LABELS = {"le", "job", "instance"}
_NAME = re.compile(r"\b(?:vllm:|hippo[_:]|process_|up\b)[a-z0-9_:]*")


def _known_series() -> dict[str, set[str]]:
    """Label names by series, recording rules included."""
    known: dict[str, set[str]] = {name: set() for name in _OTHERS}
    for metric in (*VLLM_METRICS, *GATEWAY_METRICS, *SERVICE_METRICS):
        suffixes = ("_bucket", "_sum", "_count") if metric.kind is Kind.HISTOGRAM else ("",)
        for suffix in suffixes:
            known.setdefault(metric.series_name + suffix, set()).update(metric.label_names)
    for group in RULES:
        known.update({rule["record"]: set() for rule in group["rules"] if "record" in rule})
    return known


def _expressions() -> list[str]:
    panels = [expr for panel in PANELS for expr in panel.exprs]
    return panels + [rule["expr"] for group in RULES for rule in group["rules"]]


@pytest.mark.parametrize("expr", _expressions())
def test_panels_and_rules_ask_for_metrics_and_labels_that_there_are(expr: str) -> None:
    known = _known_series()
    names = set(_NAME.findall(re.sub(r'"[^"]*"', '""', expr)))
    assert names and names <= set(known), names - set(known)
    asked = {
        label.strip()
        for group in re.findall(r"\bby \(([^)]*)\)", expr)
        for label in group.split(",")
    } | set(re.findall(r"([a-z_]+)(?:=~|!~|!=|=)\"", expr))
    assert asked <= set.union(_LABELS, *(known[name] for name in names))
    assert "vector(" not in expr


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_every_panel_answers_a_question_in_a_unit_with_an_explanation(panel: Panel) -> None:
    assert panel.title.endswith("?")
    assert panel.unit and panel.description.endswith((".", ")"))
    assert all(panel.legends)


def test_panels_lie_side_by_side_on_the_grid_and_use_the_provisioned_data_source() -> None:
    provisioned = yaml.safe_load(
        (FOLDER.parent / "provisioning" / "datasources" / "prometheus.yml").read_text()
    )["datasources"]
    assert [source["uid"] for source in provisioned] == ["prometheus"]
    for dashboard in dashboards().values():
        panels = dashboard["panels"]
        cells = [
            (x, y)
            for panel in panels
            for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
            for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
        ]
        assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
        assert {panel["datasource"]["uid"] for panel in panels} == {"prometheus"}
        assert len({panel["id"] for panel in panels}) == len(panels)


def test_every_alert_has_a_paragraph_in_the_runbook_and_a_promtool_test() -> None:
    runbook = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8").partition("## Runbook")
    headings = set(re.findall(r"^### (\w+)$", runbook[2], re.MULTILINE))
    tested = (PROMETHEUS / "tests" / "hippo.yml").read_text()
    assert headings == {rule["alert"] for rule in ALERTS}
    for rule in ALERTS:
        name = rule["alert"]
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{name.lower()}"
        assert re.search(rf"alertname: {name}\n +exp_alerts:\n", tested), f"{name} never fires"


def test_the_doctors_bounds_are_those_of_the_alerts() -> None:
    exprs = {rule["alert"]: rule["expr"] for rule in ALERTS}
    assert exprs["HippoSpeedupBelowOne"].endswith(f"< {doctor.LEAST_SPEEDUP:g}")
    assert exprs["HippoAcceptanceCollapsed"].endswith(f"< {doctor.LEAST_ACCEPTANCE:g}")
    assert exprs["HippoRunsShort"].endswith(f"< {doctor.LEAST_RUN_LENGTH:g}")
    assert exprs["HippoStaleBlocks"].endswith(f"> {doctor.MOST_STALE_BLOCKS:g}")
    assert exprs["HippoRequestsFailing"].endswith(f"> {doctor.MOST_FAILED_REQUESTS:g}")
    assert exprs["HippoAcceptedButSlow"] == (
        f"hippo:acceptance:ratio > {doctor.HIGH_ACCEPTANCE:g} and "
        f"hippo:speedup:ratio < {doctor.SPEEDUP_OF_HIGH_ACCEPTANCE:g}"
    )
    panels = dashboards()["speculation.json"]["panels"]
    (panel,) = (each for each in panels if "run_length" in json.dumps(each.get("targets", "")))
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    assert steps[1]["value"] == doctor.LEAST_RUN_LENGTH
    assert f"Below {doctor.LEAST_RUN_LENGTH:g} " in panel["description"]


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "rules/hippo.yml"),
        ("test", "rules", "tests/hippo.yml"),
    ],
)
def test_prometheus_accepts_its_configuration_and_the_alerts_do_what_they_should(
    arguments: tuple[str, ...],
) -> None:
    done = subprocess.run(
        ["promtool", *arguments], cwd=PROMETHEUS, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
