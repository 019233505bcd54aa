"""Building blocks of the Grafana dashboard: queries, stat panels and time series, as plain dicts.

`docs.dashboard` composes them. Thresholds come from `docs.alerting`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from docs.alerting import Expression, Measure, quantile

Panel = dict[str, Any]

SELECT = '{namespace=~"$namespace", llmdeployment=~"$llmdeployment"}'
WINDOW = "$__rate_interval"
ONE = "{{namespace}}/{{llmdeployment}}"
PODS = "namespace, llmdeployment, pod"
PERCENTILES = (0.5, 0.95, 0.99)


@dataclass(frozen=True)
class Curve:
    """A query and the legend of its series."""

    expression: str
    legend: str


def of(expression: Expression, legend: str = ONE) -> Curve:
    return Curve(expression(SELECT, WINDOW), legend)


def rate(metric: str, legend: str, by: str = "") -> Curve:
    labels = "namespace, llmdeployment" + (f", {by}" if by else "")
    return Curve(f"sum by ({labels}) (rate({metric}{SELECT}[{WINDOW}]))", legend)


def percentiles(histogram: str) -> list[Curve]:
    return [of(quantile(share, histogram), f"{ONE} p{share * 100:g}") for share in PERCENTILES]


def stat(title: str, description: str, unit: str, curve: Curve, measure: Measure | None = None) -> Panel:
    options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "background" if measure else "value"}
    return {**_panel("stat", title, description, unit, [curve], measure), "options": options}


def graph(
    title: str, description: str, unit: str, curves: list[Curve], measure: Measure | None = None
) -> Panel:
    panel = _panel("timeseries", title, description, unit, curves, measure)
    panel["options"] = {
        "legend": {"displayMode": "list", "placement": "bottom"},
        "tooltip": {"mode": "multi"},
    }
    if measure:
        panel["fieldConfig"]["defaults"]["custom"] = {"thresholdsStyle": {"mode": "line"}}
    return panel


def _panel(
    kind: str, title: str, description: str, unit: str, curves: list[Curve], measure: Measure | None
) -> Panel:
    source = {"type": "prometheus", "uid": "${datasource}"}
    targets = [
        {
            "refId": chr(65 + index),
            "datasource": source,
            "expr": curve.expression,
            "legendFormat": curve.legend,
        }
        for index, curve in enumerate(curves)
    ]
    defaults: Panel = {"unit": unit, "min": 0}
    if unit == "percentunit":
        defaults["max"] = 1
    defaults |= {"thresholds": {"mode": "absolute", "steps": _steps(measure)}}
    return {
        "type": kind,
        "title": title,
        "description": description,
        "datasource": source,
        "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": []},
    }


def _steps(measure: Measure | None) -> list[dict[str, Any]]:
    if measure is None:
        return [{"color": "blue", "value": None}]
    if measure.falling:
        return [
            {"color": "red", "value": None},
            {"color": "orange", "value": measure.critical},
            {"color": "green", "value": measure.warning},
        ]
    return [
        {"color": "green", "value": None},
        {"color": "orange", "value": measure.warning},
        {"color": "red", "value": measure.critical},
    ]
