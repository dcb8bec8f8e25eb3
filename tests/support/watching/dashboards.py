"""The panels of the Grafana dashboards in deploy/grafana."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[3] / "deploy/grafana/dashboards"
PANEL_WINDOW = "$window"  # what rates look back on; chosen on the dashboard


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel with its PromQL expressions and their legends."""

    title: str
    description: str
    unit: str
    exprs: tuple[str, ...]
    legends: tuple[str, ...]


def dashboards() -> dict[str, Any]:
    """The dashboards' JSON by file name."""
    return {path.name: json.loads(path.read_text("utf-8")) for path in sorted(FOLDER.iterdir())}


PANELS = tuple(
    Panel(
        title=panel["title"],
        description=panel["description"],
        unit=panel["fieldConfig"]["defaults"]["unit"],
        exprs=tuple(target["expr"] for target in panel["targets"]),
        legends=tuple(target["legendFormat"] for target in panel["targets"]),
    )
    for dashboard in dashboards().values()
    for panel in dashboard["panels"]
    if "targets" in panel
)
