"""PodMonitors and the PrometheusRule against the Prometheus operator's own CRDs, on a real API server."""

from __future__ import annotations

import pytest

from e2e.api.client import Client, RefusedError
from e2e.cluster import prometheus
from quire_operator import names
from tests.chart.helm import MATRIX, of_kind, render

pytestmark = pytest.mark.api


def test_pod_monitors_and_prometheus_rules_pass_strict_field_validation(client: Client) -> None:
    for crd in prometheus.crds():
        client.install_crd(crd)
    created = 0
    for kind in ("PodMonitor", "PrometheusRule"):
        path = f"/apis/monitoring.coreos.com/v1/namespaces/quire-system/{kind.lower()}s"
        for body in of_kind(render(*MATRIX["prometheus"]), kind):
            client.request("POST", f"{path}?fieldValidation=Strict", body)
            created += 1
            with pytest.raises(RefusedError, match="unknown field"):
                client.request("POST", f"{path}?fieldValidation=Strict&dryRun=All", {**body, "spek": {}})
    assert created == 4


def test_the_pod_monitor_selects_model_servers_by_label_and_port() -> None:
    for values, namespaces in (
        ("prometheus", {"any": True}),
        ("namespaced", {"matchNames": ["team-a", "team-b"]}),
    ):
        monitors = of_kind(render(*MATRIX["prometheus"], *MATRIX[values]), "PodMonitor")
        (spec,) = [m["spec"] for m in monitors if m["metadata"]["name"] == "quire-model-servers"]
        (endpoint,) = spec["podMetricsEndpoints"]

        assert spec["selector"]["matchLabels"].items() <= names.child_labels("m").items()
        assert spec["namespaceSelector"] == namespaces
        assert endpoint["port"] == names.PORT_HTTP_NAME
        (label,) = endpoint["relabelings"][0]["sourceLabels"]
        assert label.endswith(names.LABEL_NAME.replace(".", "_").replace("/", "_"))


def test_the_operators_metrics_keep_the_namespace_label_of_the_llmdeployment() -> None:
    monitors = of_kind(render(*MATRIX["prometheus"]), "PodMonitor")
    (spec,) = [m["spec"] for m in monitors if m["metadata"]["name"] == "quire-operator"]

    assert [endpoint["honorLabels"] for endpoint in spec["podMetricsEndpoints"]] == [True]


def test_every_alert_links_to_the_runbook() -> None:
    (rule,) = of_kind(render(*MATRIX["prometheus"]), "PrometheusRule")
    links = [one["annotations"]["runbook_url"] for group in rule["spec"]["groups"] for one in group["rules"]]

    assert links and all(link.startswith("https://quire.example.com/alerts#quire") for link in links)
