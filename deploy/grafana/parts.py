"""The JSON parts of a Grafana dashboard; `make_dashboard` has the panels.

Grafana's JSON repeats every setting in each panel. This module has the settings that all panels
share.
"""

# ruff: noqa: INP001
from __future__ import annotations

from typing import Any, Final

_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
#: The label filters that replace ``{F}`` and ``{N}`` in queries: the chosen farms, the chosen
#: nodes.
_FARM: Final = 'farm=~"$farm"'
_NODE: Final = 'farm=~"$farm",node=~"$node"'
GREEN, YELLOW, RED, BLUE, GREY = "green", "yellow", "red", "blue", "text"


def _target(expr: str, legend: str = "", **more: Any) -> dict[str, Any]:
    said = expr.replace("{F}", _FARM).replace("{N}", _NODE)
    return {"datasource": _SOURCE, "expr": said, "legendFormat": legend or "__auto", **more}


def _now(expr: str) -> dict[str, Any]:
    """A query for a table: one row for each series, with its current value."""
    return _target(expr, instant=True, range=False, format="table")


def _steps(*steps: tuple[float | None, str]) -> dict[str, Any]:
    return {
        "mode": "absolute",
        "steps": [{"value": value, "color": color} for value, color in steps],
    }


def _panel(
    kind: str, title: str, about: str, targets: list[dict[str, Any]], size: tuple[int, int]
) -> dict[str, Any]:
    return {
        "type": kind,
        "title": title,
        "description": about,
        "datasource": _SOURCE,
        "targets": [{"refId": chr(ord("A") + n), **one} for n, one in enumerate(targets)],
        "gridPos": {"w": size[0], "h": size[1]},
        "fieldConfig": {"defaults": {}, "overrides": []},
        "options": {},
    }


def stat(
    title: str, about: str, expr: str, unit: str = "short", steps: Any = None, **more: Any
) -> dict[str, Any]:
    """A panel with one current number."""
    panel = _panel("stat", title, about, [_target(expr, instant=True, range=False)], (4, 4))
    panel["fieldConfig"]["defaults"] = {
        "unit": unit,
        "color": {"mode": "thresholds"},
        "thresholds": _steps(*(steps or [(None, GREY)])),
        "mappings": [],
        **more,
    }
    panel["options"] = {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "none",
        "textMode": "auto",
        "justifyMode": "auto",
        "orientation": "auto",
    }
    return panel


def lines(
    title: str,
    about: str,
    *targets: tuple[str, str],
    unit: str = "short",
    stacked: bool = False,
    least: float | None = 0,
    most: float | None = None,
    width: int = 12,
    dashed: str = "",
    colors: dict[str, str] | None = None,
) -> dict[str, Any]:
    """A panel with time series.

    Args:
        targets: queries with their legends.
        stacked: whether the sum of the series has a meaning.
        least: start of the axis; None if values may be below 0.
        most: end of the axis; by default the highest value.
        dashed: regular expression for the legends of limits, drawn as dashed lines.
        colors: colours by legend.
    """
    panel = _panel("timeseries", title, about, [_target(*one) for one in targets], (width, 8))
    panel["fieldConfig"]["defaults"] = {
        "unit": unit,
        "color": {"mode": "palette-classic"},
        "custom": {
            "drawStyle": "line",
            "lineInterpolation": "stepAfter" if stacked else "linear",
            "lineWidth": 1,
            "fillOpacity": 40 if stacked else 8,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
        },
    }
    limits = {"min": least, "max": most}
    panel["fieldConfig"]["defaults"] |= {k: v for k, v in limits.items() if v is not None}
    panel["fieldConfig"]["overrides"] = [
        {
            "matcher": {"id": "byName", "options": name},
            "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": color}}],
        }
        for name, color in (colors or {}).items()
    ]
    if dashed:
        looks = {"lineStyle": {"fill": "dash", "dash": [8, 8]}, "fillOpacity": 0}
        looks["stacking"] = {"mode": "none", "group": "B"}
        panel["fieldConfig"]["overrides"].append(
            {
                "matcher": {"id": "byRegexp", "options": dashed},
                "properties": [
                    {"id": f"custom.{key}", "value": value} for key, value in looks.items()
                ],
            }
        )
    panel["options"] = {
        "legend": {
            "showLegend": True,
            "displayMode": "table",
            "placement": "right",
            "calcs": ["lastNotNull"],
        },
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return panel


def table(
    title: str,
    about: str,
    columns: list[tuple[str, str, str]],
    labels: dict[str, str],
    width: int = 24,
) -> dict[str, Any]:
    """A panel with a row per item; columns are (title, query, unit), ``labels`` name the item."""
    panel = _panel("table", title, about, [_now(expr) for _, expr, _ in columns], (width, 8))
    letters = [target["refId"] for target in panel["targets"]]
    names = {
        f"Value #{letter}": column for letter, (column, _, _) in zip(letters, columns, strict=True)
    }
    if len(columns) == 1:
        names = {"Value": columns[0][0]}
    shown = [*labels, *names]
    panel["transformations"] = [
        {"id": "merge", "options": {}},
        {"id": "filterFieldsByName", "options": {"include": {"names": shown}}},
        {
            "id": "organize",
            "options": {
                "indexByName": {name: place for place, name in enumerate(shown)},
                "renameByName": {**labels, **names},
                "excludeByName": {},
            },
        },
    ]
    panel["fieldConfig"] = {
        "defaults": {"unit": "short", "custom": {"align": "auto", "filterable": True}},
        "overrides": [
            {
                "matcher": {"id": "byName", "options": column},
                "properties": [{"id": "unit", "value": unit}],
            }
            for column, _, unit in columns
            if unit != "short"
        ],
    }
    panel["options"] = {"showHeader": True, "cellHeight": "sm"}
    return panel


def matrix(title: str, about: str, expr: str, row: str, column: str, width: int) -> dict[str, Any]:
    """A table with a row for each value of ``row`` and a column for each value of ``column``."""
    panel = _panel("table", title, about, [_now(expr)], (width, 8))
    panel["transformations"] = [
        {
            "id": "groupingToMatrix",
            "options": {"rowField": row, "columnField": column, "valueField": "Value"},
        }
    ]
    panel["fieldConfig"]["defaults"] = {"unit": "short", "custom": {"filterable": True}}
    panel["options"] = {"showHeader": True, "cellHeight": "sm"}
    return panel


def _laid_out(rows: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """All panels with their positions and numbers."""
    found: list[dict[str, Any]] = []
    top = 0
    for name, panels in rows.items():
        place = {"x": 0, "y": top, "w": 24, "h": 1}
        found.append(
            {"type": "row", "title": name, "collapsed": False, "gridPos": place, "panels": []}
        )
        top, left, height = top + 1, 0, 0
        for panel in panels:
            size = panel["gridPos"]
            if left + size["w"] > 24:
                top, left, height = top + height, 0, 0
            panel["gridPos"] = {"x": left, "y": top, **size}
            left, height = left + size["w"], max(height, size["h"])
            found.append(panel)
        top += height
    return [{"id": number, **panel} for number, panel in enumerate(found, 1)]


def _variable(name: str, label: str, metric: str) -> dict[str, Any]:
    """A variable with a label's values; at first all of them are chosen."""
    query = f"label_values({metric}, {name})"
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _SOURCE,
        "definition": query,
        "query": {"query": query, "refId": f"variable-{name}", "qryType": 1},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        # Matches a missing label, too: a scrape configuration need not name the farm.
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
        "hide": 0,
        "options": [],
        "regex": "",
    }


def dashboard(rows: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The whole dashboard, as Grafana reads it."""
    return {
        "uid": "tunemq-farm",
        "title": "TuneMQ farm",
        "description": "Searches, trials, GPUs, nodes and owners of a farm, and its scheduler.",
        "tags": ["tunemq"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "timezone": "browser",
        "time": {"from": "now-3h", "to": "now"},
        "refresh": "30s",
        "fiscalYearStartMonth": 0,
        "links": [],
        "annotations": {
            "list": [
                {
                    "name": "Alerts",
                    "datasource": _SOURCE,
                    "enable": True,
                    "hide": False,
                    "iconColor": RED,
                    "expr": 'ALERTS{alertstate="firing",severity!="info",farm=~"$farm"}',
                    "titleFormat": "{{alertname}}",
                    "textFormat": "{{node}} {{experiment}}",
                    "step": "60s",
                }
            ]
        },
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Prometheus",
                    "type": "datasource",
                    "query": "prometheus",
                    "hide": 0,
                    "includeAll": False,
                    "multi": False,
                    "options": [],
                    "refresh": 1,
                    "regex": "",
                },
                _variable("farm", "Farm", "tunemq_nodes"),
                _variable("node", "Node", 'tunemq_node_cpus{farm=~"$farm"}'),
            ]
        },
        "panels": _laid_out(rows),
    }
