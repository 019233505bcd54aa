"""The alerts of the chart: promtool evaluates them on series with good, bad and critical values."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.alerting import BATCH_FAULTS, FAULTS, GATEWAY_FAULTS, MEASURES
from e2e.cluster import prometheus

ROOT = Path(__file__).parents[2]
RULES = ROOT / "charts" / "quire" / "files" / "alerts.yaml"
MODEL = 'namespace="a",llmdeployment="m",pod="m-0"'
BOUNDS = ("0.1", "0.2", "0.5", "1", "2", "5", "10", "+Inf")
MINUTES = 60

Series = dict[str, str]


def counter(per_minute: float) -> str:
    return f"0+{per_minute:g}x{MINUTES}"


def constant(value: float) -> str:
    return f"{value:g}+0x{MINUTES}"


def first_tokens(per_minute: float = 100, **shares: float) -> Series:
    """TTFT histogram series with a share of the first tokens in each bucket: upto_1=0.98, upto_2=0.02."""
    by_bound = {name.removeprefix("upto_").replace("_", "."): share for name, share in shares.items()}
    sums, series = 0.0, {}
    for bound in BOUNDS:
        sums += by_bound.get(bound, 0)
        series[f'llm_ttft_seconds_bucket{{{MODEL},le="{bound}"}}'] = counter(round(per_minute * sums, 3))
    return {**series, f"llm_ttft_seconds_count{{{MODEL}}}": counter(per_minute)}


def requests(**per_minute: float) -> Series:
    return {f'llm_requests_total{{{MODEL},status="{s}"}}': counter(n) for s, n in per_minute.items()}


def queue(*waiting: float) -> Series:
    return {
        f'llm_queue_depth{{namespace="a",llmdeployment="m",pod="m-{i}"}}': constant(n)
        for i, n in enumerate(waiting)
    }


def gpus(busy: float, running: float) -> Series:
    series = {f'llm_gpu_utilization_ratio{{{MODEL},gpu_id="{i}"}}': constant(busy) for i in range(2)}
    return {**series, f"llm_running_requests{{{MODEL}}}": constant(running)}


LEADER = {'quire_operator_leader{namespace="q",pod="o-0"}': "1+0x60"}
STANDBY = {'quire_operator_leader{namespace="q",pod="o-1"}': "0+0x60"}
STALE = 'quire_operator_watch_stale{namespace="q",pod="o-0",kind="Pod"}'
FAILS = 'quire_operator_reconcile_total{namespace="q",pod="o-0",result="error"}'
READY = 'quire_llmdeployment_ready{namespace="a",llmdeployment="m",pod="o-%d"}'

BOTH = {"warning", "critical"}


def gateway(metric: str, values: str, **labels: str) -> Series:
    pairs = {"namespace": "q", "pod": "g-0", "model": "m", **labels}
    selector = ",".join(f'{name}="{value}"' for name, value in pairs.items())
    return {f"gateway_{metric}{{{selector}}}": values}


def through(**per_minute: float) -> Series:
    """Requests through a gateway by how they ended."""
    series: Series = {}
    for status, number in per_minute.items():
        series |= gateway("requests_total", counter(number), client="", status=status)
    return series


GATEWAY_CASES: dict[str, tuple[Series, dict[str, set[str]]]] = {
    "0.9 % of the gateway's requests fail": (through(success=991, error=9, limited=500), {}),
    "1.1 % of the gateway's requests fail": (
        through(success=989, error=5, shed=6),
        {"QuireGatewayRequestsFail": {"critical"}},
    ),
    "requests wait in vain for a model": (
        gateway("hold_duration_seconds_count", counter(0.2), outcome="timeout"),
        {"QuireGatewayModelDoesNotStart": {"critical"}},
    ),
    "requests wait for a model that starts": (
        gateway("hold_duration_seconds_count", counter(20), outcome="released"),
        {},
    ),
    "6 % of answers are fallbacks": (
        {**through(success=100), **gateway("fallbacks_total", counter(6), step="canned")},
        {"QuireGatewayFallsBack": {"warning"}},
    ),
    "4 % of answers are fallbacks": (
        {**through(success=100), **gateway("fallbacks_total", counter(4), step="canned")},
        {},
    ),
    "a replica stays ejected": (
        gateway("replicas", constant(1), state="ejected"),
        {"QuireGatewayReplicaEjected": {"warning"}},
    ),
    "a replica was ejected for five minutes": (
        gateway("replicas", "0+0x30 1 1 1 1 1 0+0x24", state="ejected"),
        {},
    ),
    "the gateway is gone for ten minutes": (
        {'gateway_requests_in_flight{namespace="q",pod="g-0"}': "0+0x45 stale _x14"},
        {"QuireGatewayGone": {"critical"}},
    ),
    "a gateway has lost its limit store": (
        {
            f'gateway_limit_store_up{{namespace="q",pod="{pod}"}}': constant(value)
            for pod, value in (("g-0", 1), ("g-1", 0))
        },
        {"QuireGatewayLimitStoreLost": {"warning"}},
    ),
    "every gateway has its limit store": (
        {'gateway_limit_store_up{namespace="q",pod="g-0"}': constant(1)},
        {},
    ),
    "an idle gateway": ({'gateway_requests_in_flight{namespace="q",pod="g-0"}': constant(0)}, {}),
}


def batch(metric: str, values: str, pod: str = "b-0", **labels: str) -> Series:
    pairs = {"namespace": "q", "pod": pod, **labels}
    selector = ",".join(f'{name}="{value}"' for name, value in pairs.items())
    return {f"batch_{metric}{{{selector}}}": values}


def workers(open_batches: str, lines: dict[str, str], pods: tuple[str, ...] = ("b-0", "b-1")) -> Series:
    """Several quire-batch that run, each of which says what is open in their database."""
    series: Series = {}
    for pod in pods:
        series |= batch("lines_in_flight", constant(0), pod)
        series |= batch("open_batches", open_batches, pod, status="in_progress")
        series |= batch("open_batches", constant(0), pod, status="validating")
        for status, values in lines.items():
            series |= batch("lines_total", values, pod, status=status)
    return series


NO_LINES = {"done": constant(0), "failed": constant(0), "error": constant(0)}
BATCH_CASES: dict[str, tuple[Series, dict[str, set[str]]]] = {
    "no batch is open": (workers(constant(0), NO_LINES), {}),
    "batches do not progress": (
        workers(constant(2), NO_LINES), {"QuireBatchesStall": {"warning"}}
    ),
    "batches did not progress for half an hour, and do now": (
        workers(constant(2), {**NO_LINES, "done": "0+0x45 1+1x14"}), {}
    ),
    "one batch of two workers progresses": (
        {**workers(constant(2), NO_LINES), **batch("lines_total", counter(1), "b-1", status="done")}, {}
    ),
    "a batch of a day ago cannot be ended, and others progress": (
        {
            **workers(constant(2), {"done": counter(10)}),
            **batch("oldest_age_seconds", "90100+60x60"),
        },
        {"QuireBatchesStall": {"warning"}},
    ),
    "a batch is as old as it may be": (
        {**workers(constant(2), {"done": counter(10)}), **batch("oldest_age_seconds", constant(86_400))}, {}
    ),
    "6 % of lines fail because of servers": (
        workers(constant(1), {"done": counter(94), "error": counter(6)}),
        {"QuireBatchLinesFail": {"warning"}},
    ),
    "4 % of lines fail because of servers, and many by themselves": (
        workers(constant(1), {"done": counter(60), "error": counter(4), "failed": counter(36)}), {}
    ),
    "few lines fail": (workers(constant(1), {"done": counter(0.2), "error": counter(0.2)}), {}),
    "webhooks fail": (
        {
            **batch("webhooks_total", counter(0.4), status="failed"),
            **batch("webhooks_total", counter(0.2), status="delivered"),
        },
        {"QuireBatchWebhooksFail": {"warning"}},
    ),
    "one receiver of many is away": (
        {
            **batch("webhooks_total", counter(0.4), status="failed"),
            **batch("webhooks_total", counter(4), status="delivered"),
        },
        {},
    ),
    "one webhook is given up": (batch("webhooks_total", "0+0x30 6+0x29", status="failed"), {}),
    "one worker has lost the database": (
        {**workers(constant(0), NO_LINES), **batch("lines_in_flight", constant(1), "b-2")},
        {"QuireBatchDatabaseLost": {"critical"}},
    ),
    "the database was away for a minute": (
        {
            **batch("lines_in_flight", constant(1)),
            **batch("open_batches", "0+0x53 stale 0+0x5", status="in_progress"),
        },
        {},
    ),
    "the disk is full": (
        batch("store_errors_total", counter(2)), {"QuireBatchStoreFails": {"warning"}}
    ),
    "a failure now and then": (batch("store_errors_total", counter(0.5)), {}),
    "quire-batch is gone for ten minutes": (
        {
            **batch("lines_in_flight", "0+0x45 stale _x14"),
            **batch("open_batches", "0+0x45 stale _x14", status="validating"),
        },
        {"QuireBatchGone": {"critical"}},
    ),
}  # fmt: skip
# name: series, the alerts that fire on them with their severities
CASES: dict[str, tuple[Series, dict[str, set[str]]]] = {
    "no series": ({}, {}),
    "all values are good": (
        {
            **first_tokens(upto_0_1=1),
            **requests(success=1000, client_error=50, limited=100, aborted=50),
            **queue(25, 25),
            **gpus(0.9, 8),
        },
        {},
    ),
    "the median is 198 ms": (first_tokens(upto_0_1=0.01, upto_0_2=0.5, upto_0_5=0.49), {}),
    "the median is 206 ms": (
        first_tokens(upto_0_2=0.49, upto_0_5=0.51), {"QuireFirstTokenSlow": {"warning"}}
    ),
    "the median is 479 ms": (
        first_tokens(upto_0_2=0.3, upto_0_5=0.215, upto_1=0.485),
        {"QuireFirstTokenSlow": {"warning"}, "QuireFirstTokenTailSlow": {"warning"}},
    ),
    "the median is 750 ms": (
        first_tokens(upto_1=1), {"QuireFirstTokenSlow": BOTH, "QuireFirstTokenTailSlow": {"warning"}}
    ),
    "the p99 is 473 ms": (first_tokens(upto_0_1=0.98, upto_0_5=0.011, upto_1=0.009), {}),
    "the p99 is 545 ms": (
        first_tokens(upto_0_1=0.989, upto_1=0.011), {"QuireFirstTokenTailSlow": {"warning"}}
    ),
    "the p99 is 1.5 s": (
        first_tokens(upto_0_1=0.98, upto_2=0.02), {"QuireFirstTokenTailSlow": {"warning"}}
    ),
    "the p99 is 3.5 s": (first_tokens(upto_0_1=0.98, upto_5=0.02), {"QuireFirstTokenTailSlow": BOTH}),
    "one an hour is slow": (first_tokens(per_minute=0.1, upto_10=1), {}),
    "0.05 % of errors": (requests(success=9995, error=5), {}),
    "0.15 % of errors": (requests(success=9985, error=15), {"QuireErrors": {"warning"}}),
    "1.5 % of errors": (requests(success=985, error=15), {"QuireErrors": BOTH}),
    "many are refused": (requests(success=900, shed=100), {"QuireErrors": BOTH}),
    "answers are cancelled": (requests(success=900, cancelled=100), {"QuireErrors": BOTH}),
    "a queue of 51 over two pods": (queue(25, 26), {"QuireQueueLong": {"warning"}}),
    "a queue of 200": (queue(200), {"QuireQueueLong": {"warning"}}),
    "a queue of 201": (queue(201), {"QuireQueueLong": BOTH}),
    "GPUs are 71 % busy": (gpus(0.71, 8), {}),
    "GPUs are 69 % busy": (gpus(0.69, 8), {"QuireGPUIdle": {"warning"}}),
    "GPUs are 39 % busy": (gpus(0.39, 8), {"QuireGPUIdle": BOTH}),
    "GPUs are idle without requests": (gpus(0, 0), {}),
    "no leader": (STANDBY, {"QuireOperatorWithoutLeader": {"critical"}}),
    "one leader": ({**LEADER, **STANDBY}, {}),
    "stale after each restart": (
        {**LEADER, STALE: "0+0x9 1 0+0x14 1 0+0x14 1 0+0x9"},
        {"QuireOperatorWatchStale": {"warning"}},
    ),
    "stale until it was restarted": ({**LEADER, STALE: "0+0x34 1 0+0x25"}, {}),
    "a sound watch": ({**LEADER, STALE: constant(0)}, {}),
    "reconciles fail": ({**LEADER, FAILS: counter(2)}, {"QuireReconcilesFail": {"warning"}}),
    "a model is not Ready": (
        {**LEADER, READY % 0: "1+0x39 0+0x20"}, {"QuireModelNotReady": {"critical"}}
    ),
    "not Ready across a change of the leader": (
        {**LEADER, READY % 0: "0+0x45 _x15", READY % 1: "_x46 0+0x14"}, {"QuireModelNotReady": {"critical"}}
    ),
    "not Ready for ten minutes": ({**LEADER, READY % 0: "1+0x44 0+0x15"}, {}),
    "one of two models is Ready": ({**LEADER, READY % 0: constant(1)}, {}),
    "suspended": ({**LEADER, READY % 0: "0+0x30 stale _x29"}, {}),
    **GATEWAY_CASES,
    **BATCH_CASES,
    "one failed": ({**LEADER, FAILS: "0 1+0x60"}, {}),
}  # fmt: skip


def promtool_case(name: str) -> dict[str, Any]:
    series, firing = CASES[name]
    if not any("quire_operator" in one for one in series):
        series = {**series, **LEADER}
    samples = [
        {"labels": f'{{alertname="{alert}",severity="{severity}"}}', "value": 1}
        for alert, severities in firing.items()
        for severity in severities
    ]
    query = {
        "expr": 'count by (alertname, severity) (ALERTS{alertstate="firing"})',
        "eval_time": f"{MINUTES - 5}m",
        "exp_samples": samples,
    }
    return {
        "name": name,
        "interval": "1m",
        "input_series": [{"series": one, "values": values} for one, values in series.items()],
        "promql_expr_test": [query],
    }


@pytest.fixture(scope="module")
def promtool() -> str:
    return str(prometheus.unpack(ROOT / ".cluster") / "promtool")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def run_cases(promtool: str, folder: Path, rules: Path) -> subprocess.CompletedProcess[str]:
    file = folder / "tests.yaml"
    body = {
        "rule_files": [str(rules)],
        "evaluation_interval": "1m",
        "tests": [promtool_case(name) for name in CASES],
    }
    file.write_text(yaml.safe_dump(body, sort_keys=False), encoding="utf-8")
    return run(promtool, "test", "rules", str(file))


@pytest.mark.deep
def test_a_warning_is_raised_from_the_near_edge_of_its_band_and_a_critical_one_from_the_far(
    promtool: str, tmp_path: Path
) -> None:
    done = run_cases(promtool, tmp_path, RULES)

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.deep
@pytest.mark.parametrize(
    ("bound", "other"), [("> 50\n", "> 60\n"), ("> 200\n", "> 210\n"), ("< 0.7 ", "< 0.6 ")]
)
def test_a_changed_threshold_fails_the_cases(promtool: str, tmp_path: Path, bound: str, other: str) -> None:
    changed = RULES.read_text(encoding="utf-8").replace(bound, other)
    assert changed != RULES.read_text(encoding="utf-8")
    (tmp_path / "alerts.yaml").write_text(changed, encoding="utf-8")

    assert run_cases(promtool, tmp_path, tmp_path / "alerts.yaml").returncode != 0


def test_every_alert_is_tested_at_every_severity(promtool: str) -> None:
    assert run(promtool, "check", "rules", str(RULES)).returncode == 0
    raised = {
        (alert, severity) for _, firing in CASES.values() for alert, s in firing.items() for severity in s
    }
    known = {
        (rule["alert"], rule["labels"]["severity"])
        for one in (*MEASURES, *FAULTS, *GATEWAY_FAULTS, *BATCH_FAULTS)
        for rule in one.rules()
    }

    assert raised == known


def test_every_alert_links_to_its_section_of_the_runbook() -> None:
    page = (ROOT / "docs" / "alerts.md").read_text(encoding="utf-8")
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]

    for rule in rules:
        place, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert place == "docs/alerts.md" and anchor == rule["alert"].lower()
        assert f"## {rule['alert']}\n" in page
