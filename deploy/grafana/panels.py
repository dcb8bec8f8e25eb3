"""Panels and dashboards as plain values, and the JSON that Grafana reads them from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

DATA_SOURCE = {"type": "prometheus", "uid": "prometheus"}
WINDOW = "$window"  # what rates look back on; chosen on the dashboard
_NUM_COLUMNS = 24

Kind = Literal["timeseries", "stat", "bargauge"]


@dataclass(frozen=True, slots=True)
class Query:
    """One expression, and the legend of its series."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel: its title is the question that it answers.

    ``line`` draws a bound at a value. ``unit`` is one of Grafana's, such as "s" or "percentunit".
    """

    title: str
    text: str
    unit: str
    queries: tuple[Query, ...]
    kind: Kind = "timeseries"
    width: int = 8
    height: int = 8
    line: float | None = None
    least: float | None = None
    most: float | None = None
    stacked: bool = False
    is_instant: bool = False


@dataclass(frozen=True, slots=True)
class Dashboard:
    """Panels from left to right, row by row."""

    uid: str
    title: str
    text: str
    panels: tuple[Panel, ...]


def dashboard_json(dashboard: Dashboard) -> dict[str, Any]:
    """The dashboard as Grafana stores it."""
    return {
        "annotations": {"list": []},
        "description": dashboard.text,
        "editable": True,
        "graphTooltip": 1,
        "links": [
            {
                "asDropdown": False,
                "includeVars": True,
                "keepTime": True,
                "tags": ["hippo"],
                "title": "hippo",
                "type": "dashboards",
            }
        ],
        "panels": _place(dashboard.panels),
        "refresh": "10s",
        "schemaVersion": 39,
        "tags": ["hippo"],
        "templating": {"list": [_window_variable()]},
        "time": {"from": "now-30m", "to": "now"},
        "timepicker": {},
        "timezone": "",
        "title": dashboard.title,
        "uid": dashboard.uid,
        "version": 1,
    }


def _place(panels: tuple[Panel, ...]) -> list[dict[str, Any]]:
    placed = []
    x = y = row_height = 0
    for number, panel in enumerate(panels, start=1):
        if x + panel.width > _NUM_COLUMNS:
            x, y, row_height = 0, y + row_height, 0
        grid = {"h": panel.height, "w": panel.width, "x": x, "y": y}
        placed.append({**_panel_json(panel), "id": number, "gridPos": grid})
        x += panel.width
        row_height = max(row_height, panel.height)
    return placed


def _panel_json(panel: Panel) -> dict[str, Any]:
    return {
        "datasource": DATA_SOURCE,
        "description": panel.text,
        "fieldConfig": {"defaults": _field_defaults(panel), "overrides": []},
        "options": _options(panel),
        "targets": [
            {
                "datasource": DATA_SOURCE,
                "editorMode": "code",
                "expr": query.expr,
                "instant": panel.is_instant,
                "legendFormat": query.legend,
                "range": not panel.is_instant,
                "refId": chr(ord("A") + position),
            }
            for position, query in enumerate(panel.queries)
        ],
        "title": panel.title,
        "type": panel.kind,
    }


def _field_defaults(panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.line is not None:
        steps = [{"color": "red", "value": None}, {"color": "green", "value": panel.line}]
    defaults: dict[str, Any] = {
        "color": {"mode": "thresholds" if panel.kind == "stat" else "palette-classic"},
        "thresholds": {"mode": "absolute", "steps": steps},
        "unit": panel.unit,
    }
    if panel.least is not None:
        defaults["min"] = panel.least
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "drawStyle": "line",
            "fillOpacity": 30 if panel.stacked else 5,
            "lineWidth": 1,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"group": "A", "mode": "normal" if panel.stacked else "none"},
            "thresholdsStyle": {"mode": "off" if panel.line is None else "dashed"},
        }
    return defaults


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind == "timeseries":
        return {
            "legend": {"calcs": [], "displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "none"},
        }
    reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    if panel.kind == "stat":
        return {"colorMode": "value", "graphMode": "area", "reduceOptions": reduce}
    return {"displayMode": "basic", "orientation": "vertical", "reduceOptions": reduce}


def _window_variable() -> dict[str, Any]:
    choices = ("1m", "5m", "15m", "1h", "6h")
    options = [{"selected": choice == "5m", "text": choice, "value": choice} for choice in choices]
    return {
        "auto": False,
        "current": options[1],
        "description": "What rates and quantiles look back on",
        "hide": 0,
        "label": "window",
        "name": "window",
        "options": options,
        "query": ",".join(choices),
        "refresh": 2,
        "type": "interval",
    }


def quantiles(metric: str, *shares: float, by: str = "") -> tuple[Query, ...]:
    """Quantiles of a histogram over the window, by its labels ``by`` if given."""
    grouping = f"{by}, le" if by else "le"
    legend = f"{{{{{by}}}}} " if by else ""
    return tuple(
        Query(
            f"histogram_quantile({share:g}, sum by ({grouping}) (rate({metric}_bucket[{WINDOW}])))",
            f"{legend}p{share * 100:g}",
        )
        for share in shares
    )


def rate(metric: str, *, by: str = "") -> str:
    """Growth a second of a counter over the window, summed, by its labels ``by`` if given."""
    grouping = f" by ({by}) " if by else ""
    return f"sum{grouping}(rate({metric}[{WINDOW}]))"
