"""What the metrics adapter reads of a pod's /metrics is what the server shows there, and it may go there."""

from __future__ import annotations

import re

from e2e.api.specs import DISAGGREGATED, minimal
from quire_metrics_adapter.exposition import parse
from quire_metrics_adapter.load_metrics import METRICS
from quire_metrics_adapter.pods import SELECTOR
from quire_metrics_adapter.settings import Settings
from quire_operator import names, resources, spec
from quire_operator.settings import Settings as OperatorSettings
from quire_server.core.stats import EngineStats
from quire_server.metrics.gpu import GpuSample
from quire_server.metrics.requests import Metrics


def test_every_metric_of_a_server_with_a_gpu_is_read() -> None:
    metrics = Metrics('odd"} 9 {\n name')
    metrics.step(EngineStats(waiting=3, deferred=2, running=4, kv_utilization=0.25))
    metrics.gpus.take((GpuSample("0", {"used": 1}, 0.5), GpuSample("1", {"used": 1}, 1.0)))

    text, _ = metrics.exposition("text/plain;version=0.0.4")

    assert parse(text) == {
        "llm_queue_depth": 5,
        "llm_running_requests": 4,
        "llm_kv_cache_utilization": 0.25,
        "llm_gpu_utilization": 0.75,
    }
    assert parse(text, names.ROLE_PREFILL) == {"llm_prefill_queue_depth": 5}


def test_the_autoscaler_asks_for_what_the_adapter_has() -> None:
    of_prefill = set(names.METRICS_OF_PREFILL.values())
    assert {*names.METRICS.values(), *of_prefill} == METRICS.keys()
    assert {m.name for m in METRICS.values() if m.role == names.ROLE_PREFILL} == of_prefill
    assert {names.METRICS[kind] for kind in names.SHARES} == {
        metric.name for metric in METRICS.values() if metric.is_share
    }


def test_without_a_gpu_there_is_no_utilisation_instead_of_an_idle_gpu() -> None:
    text, _ = Metrics("m").exposition("")

    assert parse(text).keys() == set(names.METRICS.values()) - {"llm_gpu_utilization"}


def test_the_pods_that_the_operator_makes_are_those_that_are_asked_where_they_answer() -> None:
    children = resources.build(spec.parse(DISAGGREGATED[0]), OperatorSettings(engine_image="x:1"))
    templates = [child["spec"]["template"] for child in children if child["kind"] == "Deployment"]
    roles = {template["metadata"]["labels"][names.LABEL_ROLE] for template in templates}
    ports = {port["name"]: port["containerPort"] for port in templates[0]["spec"]["containers"][0]["ports"]}

    assert all(names.LABEL_NAME in template["metadata"]["labels"] for template in templates)
    listed = f"{names.LABEL_NAME},{names.LABEL_ROLE} in \\((.*)\\)"
    assert roles == set(re.fullmatch(listed, SELECTOR)[1].split(","))  # type: ignore[index]  # it has this form
    asked = Settings(pod_name="p", namespace="n", service="s").engine_port
    assert asked == ports[names.PORT_HTTP_NAME]


def test_the_pods_let_the_adapters_namespace_in_which_is_the_operators() -> None:
    children = resources.build(spec.parse(minimal()), OperatorSettings(engine_image="x:1"))
    (policy,) = [child["spec"] for child in children if child["kind"] == "NetworkPolicy"]
    ours = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "quire-system"}}}

    assert any(
        ours in rule["from"] and {"protocol": "TCP", "port": names.PORT_HTTP} in rule["ports"]
        for rule in policy["ingress"]
    )
