"""The Grafana dashboard of model servers: charts/quire/files/dashboard.json.

The rows are in the order of a diagnosis: overview, latency, load, engine, KV cache, ranks, GPU; then cost,
operator, gateway and batches. Thresholds and the expressions that have them come from `docs.alerting`.
"""

from __future__ import annotations

import json
from typing import Any

from docs.alerting import BY, MEASURES, quantile
from docs.panels import (
    ONE,
    PERCENTILES,
    PODS,
    SELECT,
    WINDOW,
    Curve,
    Panel,
    graph,
    of,
    percentiles,
    rate,
    stat,
)

_BY_ALERT = {measure.alert: measure for measure in MEASURES}
_FIRST_TOKEN_P95 = quantile(0.95, "llm_ttft_seconds")
_RANK = "{{pod}} rank {{rank}} on {{host}}"
_COST = f"max by ({BY}) (quire_llmdeployment_cost_per_hour{SELECT})"


def _overview() -> list[Panel]:
    median, tail = _BY_ALERT["QuireFirstTokenSlow"], _BY_ALERT["QuireFirstTokenTailSlow"]
    errors, queue = _BY_ALERT["QuireErrors"], _BY_ALERT["QuireQueueLong"]
    return [
        stat(
            "Requests",
            "Rate of all completion requests, whatever their outcome.",
            "reqps",
            rate("llm_requests_total", ONE),
        ),
        stat(
            "Errors",
            "Share of requests that failed, were refused (503) or were cancelled by a drain; 429 does not "
            "count.",
            errors.unit,
            of(errors.expression),
            errors,
        ),
        stat("TTFT p50", "Median time to first token.", "s", of(median.expression), median),
        stat("TTFT p95", "95th percentile of the time to first token.", "s", of(_FIRST_TOKEN_P95)),
        stat("TTFT p99", "99th percentile of the time to first token.", "s", of(tail.expression), tail),
        stat(
            "Queue length",
            "Requests that wait for the engine, summed over all pods.",
            "short",
            of(queue.expression),
            queue,
        ),
    ]


def _latency() -> list[Panel]:
    times = [
        of(quantile(0.99, f"vllm:request_{part}_time_seconds"), f"{ONE} {part}")
        for part in ("queue", "prefill")
    ]
    return [
        graph(
            "TTFT",
            "Time from arrival to the first token, p50, p95 and p99.",
            "s",
            percentiles("llm_ttft_seconds"),
            _BY_ALERT["QuireFirstTokenTailSlow"],
        ),
        graph("TTFT p99 by phase", "99th percentile of the time in the queue and in prefill.", "s", times),
        graph(
            "Inter-token latency",
            "Time between two tokens, p50, p95 and p99.",
            "s",
            percentiles("llm_inter_token_latency_seconds"),
        ),
        graph(
            "Request latency",
            "Time from arrival to the end of successful answers, p50, p95 and p99.",
            "s",
            percentiles("llm_request_latency_seconds"),
        ),
    ]


def _load() -> list[Panel]:
    return [
        graph(
            "Requests by status",
            "Rate of completion requests by outcome.",
            "reqps",
            [rate("llm_requests_total", f"{ONE} {{{{status}}}}", "status")],
        ),
        graph(
            "Refused requests",
            "Rate of refused requests by reason.",
            "reqps",
            [rate("llm_requests_refused_total", f"{ONE} {{{{reason}}}}", "reason")],
        ),
        graph(
            "Tokens per second",
            "Prompt tokens and generated tokens.",
            "short",
            [
                rate("llm_prompt_tokens_total", f"{ONE} prompts"),
                rate("llm_tokens_generated_total", f"{ONE} generated"),
            ],
        ),
        graph(
            "Waiting and running requests",
            "For each pod.",
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
            "Batch size",
            "Mean number of requests in a step, while there are steps.",
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
            "Preemptions",
            "Preempted requests; many mean that the KV cache is too small.",
            "ops",
            [
                rate("llm_preemptions_total", ONE),
            ],
        ),
    ]


def _kv_cache() -> list[Panel]:
    return [
        graph(
            "KV cache in use",
            "Share of the KV cache in use, for each pod, since shares cannot be added.",
            "percentunit",
            [
                Curve(f"max by ({PODS}) (llm_kv_cache_utilization{SELECT})", "{{pod}}"),
            ],
        ),
        graph(
            "Prefix cache hit rate",
            "Share of looked-up prompt tokens that were found.",
            "percentunit",
            [
                Curve(
                    f"sum by ({BY}) (rate(llm_prefix_cache_hit_tokens_total{SELECT}[{WINDOW}]))"
                    f" / (sum by ({BY}) (rate(llm_prefix_cache_query_tokens_total{SELECT}[{WINDOW}])) > 0)",
                    ONE,
                ),
            ],
        ),
        graph(
            "Evictions",
            "Cached KV blocks that were given away for others: by the cache itself, and by its lower tiers. "
            "Many mean that prefixes are lost before they are asked for again.",
            "ops",
            [
                rate("llm_kv_cache_evictions_total", f"{ONE} cache"),
                rate("llm_kv_tier_evicted_blocks_total", f"{ONE} {{{{tier}}}}", "tier"),
            ],
        ),
    ]


def _ranks() -> list[Panel]:
    """Of servers whose model is divided; the others have no such series. The rank that waits least for others
    is the slow one: they wait for it.
    """

    def each(metric: str) -> Curve:
        return Curve(f"sum by ({PODS}, rank, host) (rate({metric}{SELECT}[{WINDOW}]))", _RANK)

    return [
        graph(
            "Busy ranks",
            "Share of time in which each rank computes, without waits for others. One above the others of "
            "its stage holds them up; one stage above the others is too large.",
            "percentunit",
            [each("llm_rank_busy_seconds_total")],
        ),
        graph(
            "Silence of ranks",
            "For how long a rank has not run, or has owed the answer to a step; seconds end the server.",
            "s",
            [Curve(f"max by ({PODS}, rank, host) (llm_rank_silence_seconds{SELECT})", _RANK)],
        ),
        graph(
            "Bytes between ranks",
            "What each rank exchanges with the others in a second: sums, hidden states and logits.",
            "Bps",
            [each("llm_rank_exchanged_bytes_total")],
        ),
    ]


def _gpu() -> list[Panel]:
    return [
        graph(
            "GPU utilisation",
            "Share of time in which a kernel ran.",
            "percentunit",
            [
                Curve(f"avg by ({PODS}, gpu_id) (llm_gpu_utilization_ratio{SELECT})", "{{pod}} {{gpu_id}}"),
            ],
            _BY_ALERT["QuireGPUIdle"],
        ),
        graph(
            "GPU memory",
            "Memory as reported by the driver, and as used by the server.",
            "bytes",
            [
                Curve(
                    f"sum by ({PODS}, gpu_id, kind) (llm_gpu_memory_bytes{SELECT})",
                    "{{pod}} {{gpu_id}} {{kind}}",
                ),
            ],
        ),
    ]


def _cost() -> list[Panel]:
    tokens = f"sum by ({BY}) (rate(llm_tokens_generated_total{SELECT}[{WINDOW}]))"
    return [
        graph(
            "Cost per hour",
            "Accelerators of all pods that have a node, by costPerHour of the AcceleratorProfile.",
            "short",
            [Curve(_COST, ONE)],
        ),
        graph(
            "Cost per million tokens",
            "Cost per hour divided by the tokens that are generated in an hour at the present rate.",
            "short",
            [Curve(f"{_COST} / ({tokens} * 3600 > 0) * 1e6", ONE)],
        ),
    ]


def _operator() -> list[Panel]:
    """All LLMDeployments together: these series have no label of one."""
    seconds = f"sum by (le) (rate(quire_operator_reconcile_seconds_bucket[{WINDOW}]))"
    return [
        graph(
            "Reconciliations",
            "Rate by result; error and bug should not last.",
            "ops",
            [Curve(f"sum by (result) (rate(quire_operator_reconcile_total[{WINDOW}]))", "{{result}}")],
        ),
        graph(
            "Reconciliation time",
            "Duration of one, p50, p95 and p99.",
            "s",
            [Curve(f"histogram_quantile({share}, {seconds})", f"p{share * 100:g}") for share in PERCENTILES],
        ),
        graph(
            "Work queue",
            "Age of the LLMDeployment that waits longest.",
            "s",
            [Curve("max(quire_operator_queue_oldest_seconds)", "oldest")],
        ),
        graph(
            "Leader and watches",
            "Replicas that lead (1 is right), and watches that miss changes (0 is right).",
            "short",
            [
                Curve("sum(quire_operator_leader)", "leaders"),
                Curve("sum(max by (kind) (quire_operator_watch_stale))", "stale watches"),
            ],
        ),
    ]


def _gateway() -> list[Panel]:
    """By the names that clients ask for: these series have no LLMDeployment, and their namespace is that of
    the gateways.
    """

    def by(metric: str, label: str, legend: str) -> Curve:
        return Curve(f"sum by (model, {label}) (rate({metric}[{WINDOW}]))", legend)

    first = f"sum by (le, model) (rate(gateway_time_to_first_token_seconds_bucket[{WINDOW}]))"
    return [
        graph(
            "Gateway requests",
            "Rate of requests through all gateways by outcome.",
            "reqps",
            [by("gateway_requests_total", "status", "{{model}} {{status}}")],
        ),
        graph(
            "Gateway TTFT",
            "Time from arrival at the gateway to the first bytes of an answer, p50, p95 and p99.",
            "s",
            [
                Curve(f"histogram_quantile({share}, {first})", f"{{{{model}}}} p{share * 100:g}")
                for share in PERCENTILES
            ],
        ),
        graph(
            "Gateway retries and fallbacks",
            "Rate of second attempts by why the first one failed, and of what was done where no replica "
            "answered.",
            "ops",
            [
                by("gateway_retries_total", "reason", "{{model}} retried: {{reason}}"),
                by("gateway_fallbacks_total", "step", "{{model}} fell back: {{step}}"),
            ],
        ),
        graph(
            "Gateway requests in flight",
            "All that are relayed, and of them those that wait for a model that is scaled to zero.",
            "short",
            [
                Curve("sum(gateway_requests_in_flight)", "in flight"),
                Curve("sum by (model) (gateway_held_requests)", "{{model}} waits"),
            ],
        ),
    ]


def _batches() -> list[Panel]:
    """All clients together. What is open is in the database, and each worker says it."""
    seconds = f"sum by (le) (rate(batch_line_seconds_bucket[{WINDOW}]))"
    return [
        graph(
            "Batch lines",
            "Rate of lines and jobs by how they ended (failed by what they ask for, or by an error of "
            "servers), and of those that wait again, by why.",
            "ops",
            [
                Curve(f"sum by (status) (rate(batch_lines_total[{WINDOW}]))", "{{status}}"),
                Curve(f"sum by (reason) (rate(batch_line_retries_total[{WINDOW}]))", "again: {{reason}}"),
            ],
        ),
        graph(
            "Batch lines in flight",
            "Those that are asked for, and how many may be: half after a refusal, then one more at a time.",
            "short",
            [
                Curve("sum(batch_lines_in_flight)", "in flight"),
                Curve("sum(batch_concurrency_limit)", "limit"),
            ],
        ),
        graph(
            "Batch line time",
            "How long the gateway takes to answer a line, p50, p95 and p99.",
            "s",
            [Curve(f"histogram_quantile({share}, {seconds})", f"p{share * 100:g}") for share in PERCENTILES],
        ),
        graph(
            "Open batches",
            "Batches and jobs that are not over, by status.",
            "short",
            [Curve("sum by (status) (max by (namespace, status) (batch_open_batches))", "{{status}}")],
        ),
        graph(
            "Age of the oldest batch",
            "Of those that are not over; it expires after 24 hours.",
            "s",
            [Curve("max(batch_oldest_age_seconds)", "oldest")],
        ),
        graph(
            "Batch failures",
            "Rate of failures of the database and of the files' store, and of webhooks.",
            "ops",
            [
                Curve(f"sum(rate(batch_store_errors_total[{WINDOW}]))", "store"),
                Curve(f"sum by (status) (rate(batch_webhooks_total[{WINDOW}]))", "webhooks {{status}}"),
            ],
        ),
    ]


_ROWS = {
    "Overview": _overview,
    "Latency": _latency,
    "Load": _load,
    "Engine": _engine,
    "KV cache": _kv_cache,
    "Ranks": _ranks,
    "GPU": _gpu,
    "Cost": _cost,
    "Operator": _operator,
    "Gateway": _gateway,
    "Batches": _batches,
}


def dashboard() -> str:
    panels: list[Panel] = []
    y = 0
    for title, panels_of in _ROWS.items():
        row = panels_of()
        panels.append(
            {"type": "row", "title": title, "collapsed": False, "gridPos": _place(0, y, 24, 1), "panels": []}
        )
        width, height = 24 // len(row), 5 if row[0]["type"] == "stat" else 8
        for index, panel in enumerate(row):
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
