"""Writes the dashboards that Grafana is provisioned with: ``python -m deploy.grafana.build``."""

from __future__ import annotations

import json
from pathlib import Path

from deploy.grafana.overview import OVERVIEW
from deploy.grafana.panels import Dashboard, dashboard_json
from deploy.grafana.services import SERVICES
from deploy.grafana.speculation import SPECULATION

DASHBOARDS = {
    "overview.json": OVERVIEW,
    "speculation.json": SPECULATION,
    "services.json": SERVICES,
}
FOLDER = Path(__file__).parent / "dashboards"


def text_of(dashboard: Dashboard) -> str:
    """What its file holds."""
    return json.dumps(dashboard_json(dashboard), indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Writes one file a dashboard."""
    for name, dashboard in DASHBOARDS.items():
        (FOLDER / name).write_text(text_of(dashboard), encoding="utf-8")


if __name__ == "__main__":
    main()
