"""The Grafana dashboard of model servers, as plain dicts: charts/quire/files/dashboard.json.

Written by `docs.generate`; levels and the numbers that have them come from `docs.alerting`. Rows follow the
questions of who is called at night: is it well, who waits, for what, is the engine full, is the GPU busy.
"""

from __future__ import annotations

import json
from typing import Any

from docs.alerting import MEASURES, quantile
from docs.panels import ONE, PODS, SELECT, WINDOW, Curve, Panel, graph, of, percentiles, rate, stat

_BY_ALERT = {measure.alert: measure for measure in MEASURES}


def _well() -> list[Panel]:
    half, tail = _BY_ALERT["QuireFirstTokenSlow"], _BY_ALERT["QuireFirstTokenTailSlow"]
    errors, queue = _BY_ALERT["QuireErrors"], _BY_ALERT["QuireQueueLong"]
    return [
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
    ]


def _waiting() -> list[Panel]:
    times = [
        of(quantile(0.99, f"vllm:request_{part}_time_seconds"), f"{ONE} {part}")
        for part in ("queue", "prefill")
    ]
    return [
        graph(
            "First token",
            "Arrival to the first token.",
            "s",
            percentiles("llm_ttft_seconds"),
            _BY_ALERT["QuireFirstTokenTailSlow"],
        ),
        graph("First token, 99 %: where it goes", "In the queue, or in computing the prompt.", "s", times),
        graph(
            "Between tokens",
            "Time between two tokens.",
            "s",
            percentiles("llm_inter_token_latency_seconds"),
        ),
        graph("Whole answers", "Of answers that succeeded.", "s", percentiles("llm_request_latency_seconds")),
    ]


def _load() -> list[Panel]:
    return [
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
    ]


def _engine() -> list[Panel]:
    return [
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
    ]


def _gpu() -> list[Panel]:
    return [
        graph(
            "GPU busy",
            "Share of time in which a kernel ran.",
            "percentunit",
            [
                Curve(f"avg by ({PODS}, gpu_id) (llm_gpu_utilization_ratio{SELECT})", "{{pod}} {{gpu_id}}"),
            ],
            _BY_ALERT["QuireGPUIdle"],
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
    ]


_ROWS = {
    "Is it well?": _well,
    "Who waits, and for what": _waiting,
    "Load": _load,
    "Engine": _engine,
    "GPU": _gpu,
}


def dashboard() -> str:
    panels: list[Panel] = []
    y = 0
    for title, panels_of in _ROWS.items():
        held = panels_of()
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
