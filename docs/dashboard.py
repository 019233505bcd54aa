"""The Grafana dashboard of model servers, as plain dicts: charts/quire/files/dashboard.json.

Written by `docs.generate`; levels and the numbers that have them come from `docs.alerting`. Rows follow the
questions of who is called at night: is it well, who waits, for what, is the engine full, is the GPU busy.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from docs.alerting import MEASURES, Expression, Measure, quantile

Panel = dict[str, Any]

SELECT = '{namespace=~"$namespace", llmdeployment=~"$llmdeployment"}'
WINDOW = "$__rate_interval"
ONE = "{{namespace}}/{{llmdeployment}}"
PODS = "namespace, llmdeployment, pod"
_BY_ALERT = {measure.alert: measure for measure in MEASURES}


@dataclass(frozen=True)
class Curve:
    """A query and how its series are called."""

    expression: str
    legend: str


def of(expression: Expression, legend: str = ONE) -> Curve:
    return Curve(expression(SELECT, WINDOW), legend)


def rate(metric: str, legend: str, by: str = "") -> Curve:
    labels = "namespace, llmdeployment" + (f", {by}" if by else "")
    return Curve(f"sum by ({labels}) (rate({metric}{SELECT}[{WINDOW}]))", legend)


def percentiles(histogram: str) -> list[Curve]:
    return [of(quantile(share, histogram), f"{ONE} p{share * 100:g}") for share in (0.5, 0.99)]


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
    steps = {measure.good: "yellow", measure.warning: "orange", measure.critical: "red"}
    return [{"color": "green", "value": None}, *({"color": c, "value": v} for v, c in steps.items())]


def rows() -> dict[str, list[Panel]]:
    half, tail = _BY_ALERT["QuireFirstTokenSlow"], _BY_ALERT["QuireFirstTokenTailSlow"]
    errors, queue, gpu = (_BY_ALERT[name] for name in ("QuireErrors", "QuireQueueLong", "QuireGPUIdle"))
    times = [
        of(quantile(0.99, f"vllm:request_{part}_time_seconds"), f"{ONE} {part}")
        for part in ("queue", "prefill")
    ]
    return {
        "Is it well?": [
            stat(
                "Requests",
                "Requests for answers, whatever became of them.",
                "reqps",
                rate("llm_requests_total", ONE),
            ),
            stat(
                "Errors",
                "Failed, turned away (503) or cut; not 429.",
                errors.unit,
                of(errors.expression),
                errors,
            ),
            stat("First token, half", "Half of the answers begin sooner.", "s", of(half.expression), half),
            stat("First token, 99 %", "99 of 100 answers begin sooner.", "s", of(tail.expression), tail),
            stat(
                "Waiting",
                "Requests that wait for the engine, in all pods.",
                "short",
                of(queue.expression),
                queue,
            ),
        ],
        "Who waits, and for what": [
            graph("First token", "Arrival to the first token.", "s", percentiles("llm_ttft_seconds"), tail),
            graph(
                "First token, 99 %: where it goes", "In the queue, or in computing the prompt.", "s", times
            ),
            graph(
                "Between tokens",
                "Time between two tokens.",
                "s",
                percentiles("llm_inter_token_latency_seconds"),
            ),
            graph(
                "Whole answers", "Of answers that succeeded.", "s", percentiles("llm_request_latency_seconds")
            ),
        ],
        "Load": [
            graph(
                "Requests by status",
                "What became of them.",
                "reqps",
                [rate("llm_requests_total", f"{ONE} {{{{status}}}}", "status")],
            ),
            graph(
                "Turned away",
                "By reason.",
                "reqps",
                [rate("llm_requests_refused_total", f"{ONE} {{{{reason}}}}", "reason")],
            ),
            graph(
                "Tokens a second",
                "Of prompts and of answers.",
                "short",
                [
                    rate("llm_prompt_tokens_total", f"{ONE} prompts"),
                    rate("llm_tokens_generated_total", f"{ONE} answers"),
                ],
            ),
            graph(
                "Waiting and running",
                "In each pod.",
                "short",
                [
                    Curve(f"sum by ({PODS}) (llm_queue_depth{SELECT})", "{{pod}} waiting"),
                    Curve(f"sum by ({PODS}) (llm_running_requests{SELECT})", "{{pod}} running"),
                ],
            ),
        ],
        "Engine": [
            graph(
                "KV cache in use",
                "Of each pod: shares cannot be added.",
                "percentunit",
                [
                    Curve(f"max by ({PODS}) (llm_kv_cache_utilization{SELECT})", "{{pod}}"),
                ],
            ),
            graph(
                "Requests in a step",
                "Mean of the batch, while there are steps.",
                "short",
                [
                    Curve(
                        f"sum by ({PODS}) (rate(llm_batch_size_sum{SELECT}[{WINDOW}]))"
                        f" / (sum by ({PODS}) (rate(llm_batch_size_count{SELECT}[{WINDOW}])) > 0)",
                        "{{pod}}",
                    ),
                ],
            ),
            graph(
                "Found in the prefix cache",
                "Share of the tokens that were looked up.",
                "percentunit",
                [
                    Curve(
                        f"sum by (namespace, llmdeployment) "
                        f"(rate(llm_prefix_cache_hit_tokens_total{SELECT}[{WINDOW}]))"
                        f" / (sum by (namespace, llmdeployment)"
                        f" (rate(llm_prefix_cache_query_tokens_total{SELECT}[{WINDOW}])) > 0)",
                        ONE,
                    ),
                ],
            ),
            graph(
                "Preemptions",
                "Requests that had to give way: the KV cache is too small.",
                "ops",
                [
                    rate("llm_preemptions_total", ONE),
                ],
            ),
        ],
        "GPU": [
            graph(
                "GPU busy",
                "Share of time in which a kernel ran.",
                "percentunit",
                [
                    Curve(
                        f"avg by ({PODS}, gpu_id) (llm_gpu_utilization_ratio{SELECT})", "{{pod}} {{gpu_id}}"
                    ),
                ],
                gpu,
            ),
            graph(
                "GPU memory",
                "As the driver says it, and what the server holds.",
                "bytes",
                [
                    Curve(
                        f"sum by ({PODS}, gpu_id, kind) (llm_gpu_memory_bytes{SELECT})",
                        "{{pod}} {{gpu_id}} {{kind}}",
                    ),
                ],
            ),
        ],
    }


def dashboard() -> str:
    panels: list[Panel] = []
    y = 0
    for title, held in rows().items():
        panels.append(
            {"type": "row", "title": title, "collapsed": False, "gridPos": _place(0, y, 24, 1), "panels": []}
        )
        width, height = 24 // len(held), 5 if held[0]["type"] == "stat" else 8
        for index, panel in enumerate(held):
            panels.append({**panel, "gridPos": _place(index * width, y + 1, width, height)})
        y += 1 + height
    body = {
        "uid": "quire-models",
        "title": "Quire: models",
        "tags": ["quire"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": [{"id": number, **panel} for number, panel in enumerate(panels, 1)],
    }
    return json.dumps(body, indent=1) + "\n"


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _variables() -> list[dict[str, Any]]:
    queries = {
        "namespace": "label_values(llm_requests_total, namespace)",
        "llmdeployment": 'label_values(llm_requests_total{namespace=~"$namespace"}, llmdeployment)',
    }
    chosen = [
        {
            "name": name,
            "type": "query",
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "query": query,
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        }
        for name, query in queries.items()
    ]
    return [{"name": "datasource", "type": "datasource", "query": "prometheus"}, *chosen]
