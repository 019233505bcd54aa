"""The alerts of model servers, the operator, the gateway and batches: expressions, thresholds, and runbook.

This table is the only source of three things that have to agree: the Prometheus rules
(charts/quire/files/alerts.yaml), the thresholds of the dashboard (`docs.dashboard`) and the runbook
(`docs.runbook`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml

BY = "namespace, llmdeployment"
OF_LLMDEPLOYMENT = "{{ $labels.namespace }}/{{ $labels.llmdeployment }}"
OF_GATEWAY_MODEL = "{{ $labels.model }}"  # a name that clients ask a gateway for
RUNBOOKS = "docs/alerts.md"  # the chart replaces it by its value monitoring.prometheusRule.runbooks
# A percentile of fewer than ten first tokens in five minutes is not significant.
ENOUGH = f"sum by ({BY}) (increase(llm_ttft_seconds_count[5m])) >= 10"

# Grafana's units, and the template functions of Prometheus that format them.
_SHOWN = {"s": "humanizeDuration", "percentunit": "humanizePercentage", "short": "humanize"}

Expression = Callable[[str, str], str]  # takes a label selector and a window


def quantile(share: float, histogram: str, by: str = BY) -> Expression:
    """A percentile over all pods, from the sum of their buckets, since percentiles cannot be added."""
    return lambda select, window: (
        f"histogram_quantile({share}, sum by (le, {by}) (rate({histogram}_bucket{select}[{window}])))"
    )


def _errors(select: str, window: str) -> str:
    failed = select[:-1] + "," if select else "{"
    return (
        f'sum by ({BY}) (rate(llm_requests_total{failed}status=~"error|shed|cancelled"}}[{window}]))'
        f" / (sum by ({BY}) (rate(llm_requests_total{select}[{window}])) > 0)"
    )


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A metric with thresholds: `warning` is the edge of the warning band that good values reach first,
    `critical` its other edge. `falling`: low values are bad.
    """

    alert: str
    what: str
    unit: str
    expression: Expression
    warning: float
    critical: float
    minutes: tuple[int, int]  # `for` of the rules: warning, critical
    only_if: str = ""
    falling: bool = False
    impact: str
    diagnosis: str
    steps: str

    def rules(self) -> list[dict[str, Any]]:
        sign = "<" if self.falling else ">"
        condition = f" and {self.only_if}" if self.only_if else ""
        levels = zip(("warning", "critical"), (self.warning, self.critical), self.minutes, strict=True)
        return [
            rule(self, f"({self.expression('', '5m')}) {sign} {bound:g}{condition}", severity, minutes)
            for severity, bound, minutes in levels
        ]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A condition that holds or not. `of`: what there is an alert for each of, as a template of labels."""

    alert: str
    what: str
    severity: str
    expression: str
    minutes: int
    of: str = ""
    impact: str
    diagnosis: str
    steps: str

    def rules(self) -> list[dict[str, Any]]:
        return [rule(self, self.expression, self.severity, self.minutes)]


def rule(of: Measure | Fault, expression: str, severity: str, minutes: int) -> dict[str, Any]:
    subject = OF_LLMDEPLOYMENT if isinstance(of, Measure) else of.of
    where = f"{subject}: " if subject else ""
    value = f" ({{{{ $value | {_SHOWN[of.unit]} }}}})" if isinstance(of, Measure) else ""
    return {
        "alert": of.alert,
        "expr": expression,
        "for": f"{minutes}m",
        "labels": {"severity": severity},
        "annotations": {
            "summary": f"{where}{of.what}{value}",
            "description": of.impact,
            "runbook_url": f"{RUNBOOKS}#{of.alert.lower()}",
        },
    }


def _first_token(
    alert: str,
    what: str,
    share: float,
    *,
    levels: tuple[float, float],
    impact: str,
    diagnosis: str,
    steps: str,
) -> Measure:
    """A percentile of the time to first token. `levels`: warning, critical, in seconds."""
    warning, critical = levels
    return Measure(
        alert=alert,
        what=what,
        unit="s",
        expression=quantile(share, "llm_ttft_seconds"),
        warning=warning,
        critical=critical,
        minutes=(10, 5),
        only_if=ENOUGH,
        impact=impact,
        diagnosis=diagnosis,
        steps=steps,
    )


MEASURES = (
    _first_token(
        "QuireFirstTokenSlow",
        "the median time to first token is high",
        0.5,
        levels=(0.2, 0.5),
        impact="Most clients wait before an answer begins.",
        diagnosis="The panel *TTFT p99 by phase* shows where the time is spent. Queue: there are too few "
        "replicas. Prefill: prompts are long, or the prefix cache has few hits.",
        steps="Raise `spec.autoscaling.maxReplicas` or `spec.replicas`; with long prompts see "
        "[performance](performance.md).",
    ),
    _first_token(
        "QuireFirstTokenTailSlow",
        "the p99 time to first token is high",
        0.99,
        levels=(0.5, 2),
        impact="Some clients wait long before an answer begins.",
        diagnosis="Bursts fill the queue, single prompts are very long, or the load of the pods differs: "
        "compare them in *Waiting and running requests*. Preemptions mean that the KV cache is too small.",
        steps="Limit the requests of one client (`engine.maxRequestsPerKey`), raise "
        "`engine.kvCache.memory`, or add replicas; see [overload](overload.md).",
    ),
    Measure(
        alert="QuireErrors",
        what="requests fail or are refused",
        unit="percentunit",
        expression=_errors,
        warning=0.001,
        critical=0.01,
        minutes=(10, 2),
        impact="Clients get 5xx. Client errors, requests that the client cancelled, and 429 do not count.",
        diagnosis="`llm_requests_total` by `status`: `shed` is a full queue (`llm_requests_refused_total` "
        "has the reason), `cancelled` a drain that exceeded its time, `error` a failure of the engine.",
        steps="For `shed` add replicas; for `cancelled` raise `drain.timeoutSeconds`; for `error` read the "
        "pod's log and [when something fails](troubleshooting.md).",
    ),
    Measure(
        alert="QuireQueueLong",
        what="many requests wait",
        unit="short",
        expression=lambda select, _: f"sum by ({BY}) (llm_queue_depth{select})",
        warning=50,
        critical=200,
        minutes=(5, 2),
        impact="Waiting times grow; when the queue is full, requests are refused.",
        diagnosis="`kubectl get llmdep`, `kubectl get hpa`: is the autoscaler at its maximum, does it lack "
        "metrics, or are its pods waiting for nodes?",
        steps="Raise `spec.autoscaling.maxReplicas`, fix what `ScalingActive` or `Scheduled` names, or add "
        "nodes; see [autoscaling](autoscaling.md).",
    ),
    Measure(
        alert="QuireGPUIdle",
        what="GPU utilisation is low while requests are running",
        unit="percentunit",
        expression=lambda select, window: (
            f"avg by ({BY}) (avg_over_time(llm_gpu_utilization_ratio{select}[{window}]))"
        ),
        warning=0.7,
        critical=0.4,
        minutes=(30, 30),
        only_if=f"sum by ({BY}) (min_over_time(llm_running_requests[5m])) > 0",
        falling=True,
        impact="No client is affected, but GPUs that you pay for are not used.",
        diagnosis="Few requests run at once (*Batch size*), or the host is too slow: see the pod's CPU.",
        steps="Lower `spec.autoscaling.minReplicas`, give the pods more CPU, or put smaller models on "
        "smaller GPUs.",
    ),
)

FAULTS = (
    Fault(
        alert="QuireModelNotReady",
        what="the LLMDeployment is not Ready",
        severity="critical",
        # last_over_time bridges a change of the leader, which would otherwise restart the `for` time.
        expression=f"max by ({BY}) (last_over_time(quire_llmdeployment_ready[2m])) == 0",
        minutes=15,
        of=OF_LLMDEPLOYMENT,
        impact="It serves with too few replicas, with pods of an older spec, or not at all. There is no "
        "alert while no pods are wanted (suspended, idle). A model that takes longer than this to load "
        "raises it too.",
        diagnosis="`kubectl quire status NAME`: the reason and the message of `Ready`, and the last failure.",
        steps="Do what the message says: [when something fails](troubleshooting.md).",
    ),
    Fault(
        alert="QuireOperatorWithoutLeader",
        what="no operator replica is the leader",
        severity="critical",
        expression="sum by (namespace) (quire_operator_leader) == 0 or absent(quire_operator_leader)",
        minutes=2,
        impact="Models keep serving, but objects and status are not created, changed or repaired.",
        diagnosis="`kubectl get pods,lease -n quire-system`: pods that do not run, or an API server that "
        "does not answer. If there are no series at all, the operator is not scraped.",
        steps="Read the pods' logs; they restart by themselves once the API server answers.",
    ),
    Fault(
        alert="QuireOperatorWatchStale",
        what="the operator misses changes of {{ $labels.kind }}",
        severity="warning",
        # The liveness probe ends the process within a minute; 20 minutes cover the next restarts as well.
        expression="max by (namespace, kind) (max_over_time(quire_operator_watch_stale[20m])) == 1",
        minutes=30,
        impact="Changes are noticed minutes late, by the next full re-list. The operator's liveness probe "
        "failed, and a restart did not help.",
        diagnosis="`kubectl logs --previous` of the operator's pod names the watch.",
        steps="Check the API server and the network between (proxies that buffer long responses).",
    ),
    Fault(
        alert="QuireReconcilesFail",
        what="reconciliations fail repeatedly",
        severity="warning",
        expression=(
            'sum by (namespace) (increase(quire_operator_reconcile_total{result=~"error|bug"}[10m])) > 5'
        ),
        minutes=10,
        impact="At least one LLMDeployment does not reach the state in its spec.",
        diagnosis="The operator's log names it and the error; `kubectl get llmdep -A` shows its reason.",
        steps="See [when something fails](troubleshooting.md).",
    ),
)


def _share_of_gateway_requests(counted: str) -> str:
    """By the namespace of the gateways and the name that was asked for."""
    whole = 'sum by (namespace, model) (rate(gateway_requests_total{model!=""}[5m])) > 0'
    return f"sum by (namespace, model) (rate({counted}[5m])) / ({whole})"


GATEWAY_FAULTS = (
    Fault(
        alert="QuireGatewayRequestsFail",
        what="requests through the gateway fail or are refused",
        severity="critical",
        expression=_share_of_gateway_requests(
            'gateway_requests_total{status=~"error|shed|cancelled",model!=""}'
        )
        + " > 0.01",
        minutes=5,
        of=OF_GATEWAY_MODEL,
        impact="More than one of a hundred clients gets a 5xx or an answer that breaks off. 429 and "
        "errors of clients "
        "do not count.",
        diagnosis="`gateway_requests_total` by `status`; `gateway_retries_total` by `reason` says why "
        "replicas did "
        "not answer. The access log of the gateways has the field `broken` for each such request.",
        steps="`no_replica` and `hold_timeout`: no pod is ready, see `kubectl quire status`. Refusals: "
        "add replicas. "
        "Errors: read the logs of the pods in `replicas` of the access log.",
    ),
    Fault(
        alert="QuireGatewayModelDoesNotStart",
        what="requests wait in vain for a model that is scaled to zero",
        severity="critical",
        expression="sum by (namespace, model) "
        '(increase(gateway_hold_duration_seconds_count{outcome="timeout"}[10m])) > 0',
        minutes=1,
        of=OF_GATEWAY_MODEL,
        impact="Every request gets a fallback or a 503 after the time of `LLMRoute.spec.hold`.",
        diagnosis="`kubectl get llmdep`: is the phase still `Idle`, or do its pods not become ready? "
        "`kubectl get leases -n quire-system -l serving.quire.dev/role=demand` shows what the gateways "
        "ask for.",
        steps="`Idle` in spite of a Lease: read the operator's log. Else do what `kubectl quire status "
        "NAME` says. A "
        "load that takes longer than `hold.maxSeconds` needs a longer hold.",
    ),
    Fault(
        alert="QuireGatewayFallsBack",
        what="many answers are fallbacks",
        severity="warning",
        expression=_share_of_gateway_requests("gateway_fallbacks_total") + " > 0.05",
        minutes=10,
        of=OF_GATEWAY_MODEL,
        impact="Clients get shorter answers, those of another model, or a text, marked with "
        "`x-quire-degraded`.",
        diagnosis="`gateway_fallbacks_total` by `step`; the replicas of the first target are missing, "
        "full or fail.",
        steps="Add replicas to the target, or raise its limits: see [gateway](gateway-routes.md).",
    ),
    Fault(
        alert="QuireGatewayReplicaEjected",
        what="a replica fails and gets no requests",
        severity="warning",
        expression='max by (namespace, model) (gateway_replicas{state="ejected"}) > 0',
        minutes=10,
        of=OF_GATEWAY_MODEL,
        impact="The other replicas have its load. Kubernetes takes the pod for ready.",
        diagnosis="`gateway_ejections_total`, and `gateway_retries_total` by `reason`: `connect` and "
        "`timeout` are "
        "the network between gateway and pod, `http_5xx` is the pod.",
        steps="Read the pod's log, and delete the pod if its node or its network is at fault.",
    ),
    Fault(
        alert="QuireGatewayLimitStoreLost",
        what="gateways do without their limit store",
        severity="warning",
        expression="min by (namespace) (gateway_limit_store_up) < 1",
        minutes=5,
        of="{{ $labels.namespace }}",
        impact="`onLoss: Local`: each gateway keeps its share of limits, and budgets may be exceeded by what "
        "others serve in 10 s. `Deny`: clients with limits or a budget get 503.",
        diagnosis="`gateway_limit_store_errors_total` by `reason`: `timeout` is a slow or hanging server, "
        "`connection` one that is gone or behind a NetworkPolicy, `auth` a wrong password, `config` a "
        "Secret that "
        "is no URL, `error` a server that refuses, such as a replica or one without memory. The "
        "gateways' logs "
        "have a line for each loss.",
        steps="Restore the server, or correct the Secret of `gateway.limitStore`: gateways read it again by "
        "themselves, and ask the server every few seconds.",
    ),
    Fault(
        alert="QuireGatewayGone",
        what="no gateway runs any more",
        severity="critical",
        expression="sum by (namespace) (max_over_time(gateway_requests_in_flight[1h] offset 5m) >= bool 0)"
        " unless sum by (namespace) (gateway_requests_in_flight >= bool 0)",
        minutes=2,
        of="{{ $labels.namespace }}",
        impact="Clients that go through the gateway are not served. There is no alert an hour after it "
        "was removed.",
        diagnosis="`kubectl get pods -n quire-system -l app.kubernetes.io/name=quire-gateway`. Pods "
        "that run and "
        "have no series are not scraped.",
        steps="Read the pods' logs and events; they need the API server once, to start.",
    ),
)

BATCH_FAULTS = (
    Fault(
        alert="QuireBatchesStall",
        what="batches or jobs do not progress",
        severity="warning",
        # A batch expires after 24 h, and is over when its files are written.
        expression="sum by (namespace) (max by (namespace, status) (batch_open_batches)) > 0"
        " unless on (namespace) sum by (namespace) (increase(batch_lines_total[10m])) > 0"
        " or max by (namespace) (batch_oldest_age_seconds) > 90000",
        minutes=30,
        of="{{ $labels.namespace }}",
        impact="There are some that are not over, and no line of them has ended for half an hour, or one is "
        "older than a day and cannot be ended. Those that wait expire 24 hours after they were submitted.",
        diagnosis="`batch_line_retries_total` by `reason`: `refused` is a gateway that is away, models "
        "without room, a kill switch, or limits of the client; `again` is servers that fail. None of both: "
        "the log of quire-batch says what it cannot read or write.",
        steps="Look at the models that the lines name: `kubectl get llmdep`, `kubectl quire route`. "
        "Interactive requests come first, so that models which are always busy need more replicas.",
    ),
    Fault(
        alert="QuireBatchLinesFail",
        what="lines of batches fail",
        severity="warning",
        expression='sum by (namespace) (increase(batch_lines_total{status="error"}[15m]))'
        " / (sum by (namespace) (increase(batch_lines_total[15m])) > 20) > 0.05",
        minutes=10,
        of="{{ $labels.namespace }}",
        impact="More than one of twenty is in an error file after five tries, because of servers and not of "
        "what it asks for. Lines that are wrong, that name a model which is not there, or that exceed a "
        "budget do not count.",
        diagnosis="The error files have the answers; `line_lost` are lines with which quire-batch died three "
        "times. Compare with *Gateway requests* of the dashboard.",
        steps="Read the logs of the pods that fail, or of quire-batch (`kubectl logs --previous`). Clients "
        "submit the lines of the error file again.",
    ),
    Fault(
        alert="QuireBatchWebhooksFail",
        what="ends of jobs cannot be reported",
        severity="warning",
        expression='sum by (namespace) (increase(batch_webhooks_total{status="failed"}[30m])) > 10'
        ' and sum by (namespace) (increase(batch_webhooks_total{status="failed"}[30m]))'
        " / sum by (namespace) (increase(batch_webhooks_total[30m])) > 0.5",
        minutes=5,
        of="{{ $labels.namespace }}",
        impact="A report is given up after six tries within half an hour. The jobs are over, and clients can "
        "poll them.",
        diagnosis="The log of quire-batch has `webhook failed` with the job and why: a status of the "
        "receiver, a connection that a NetworkPolicy forbids (`batch.egress`), or an origin that is not in "
        "`batch.webhooks.allow` any more.",
        steps="Ask who runs the receiver, or correct the chart's values.",
    ),
    Fault(
        alert="QuireBatchDatabaseLost",
        what="quire-batch does not reach its database",
        severity="critical",
        # What is open is read from the database with each scrape.
        expression="count by (namespace) "
        "(batch_lines_in_flight unless on (namespace, pod) batch_open_batches) > 0",
        minutes=2,
        of="{{ $labels.namespace }}",
        impact="Files, batches and jobs are answered 503, and no line is asked for. Answers that have come "
        "are kept in memory, and lost if the pod ends before the database is back.",
        diagnosis="`kubectl logs` of quire-batch, `the store fails`, says why: an address or a password that "
        "changed, `batch.egress`, or a volume that cannot be read.",
        steps="Restore the database, or correct its Secret and restart the pods. quire-batch goes on by "
        "itself.",
    ),
    Fault(
        alert="QuireBatchStoreFails",
        what="quire-batch cannot write or read what it has to",
        severity="warning",
        expression="sum by (namespace) (increase(batch_store_errors_total[10m])) > 10",
        minutes=10,
        of="{{ $labels.namespace }}",
        impact="Uploads and new batches are answered 507 or 503, and batches wait, or some of them.",
        diagnosis="The log of quire-batch says what fails: a disk that is full, a bucket that refuses, a "
        "database that is read-only, or a single file.",
        steps="A full disk: have clients delete files, lower `batch.retentionDays`, or make the claim "
        "larger. A bucket: its policy and the Secret of `batch.bucket`.",
    ),
    Fault(
        alert="QuireBatchGone",
        what="no quire-batch runs any more",
        severity="critical",
        expression="count by (namespace) (max_over_time(batch_lines_in_flight[1h] offset 5m))"
        " unless count by (namespace) (batch_lines_in_flight)",
        minutes=2,
        of="{{ $labels.namespace }}",
        impact="The gateway answers files, batches and jobs with 503 `batch_unavailable`. Nothing is lost. "
        "There is no alert an hour after it was removed.",
        diagnosis="`kubectl get pods -n quire-system -l app.kubernetes.io/name=quire-batch`, and the log of "
        "the last one: a claim that cannot be mounted, a database that is away at the start, or one of a "
        "newer version.",
        steps="Do what the log says. Pods that run and have no series are not scraped.",
    ),
)


def rules_file() -> str:
    groups = [
        {"name": "quire-models", "rules": [rule for measure in MEASURES for rule in measure.rules()]},
        {"name": "quire-operator", "rules": [rule for fault in FAULTS for rule in fault.rules()]},
        {"name": "quire-gateway", "rules": [rule for fault in GATEWAY_FAULTS for rule in fault.rules()]},
        {"name": "quire-batch", "rules": [rule for fault in BATCH_FAULTS for rule in fault.rules()]},
    ]
    head = (
        "# Generated from docs/alerting.py by `make docs`; also usable as a plain rule file of Prometheus.\n"
    )
    return head + yaml.safe_dump({"groups": groups}, sort_keys=False, width=110)
