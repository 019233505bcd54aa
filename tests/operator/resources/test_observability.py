"""The effect of `spec.observability` on the children: egress to a collector, settings, redaction patterns."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.api import specs
from quire_operator import resources, spec
from quire_operator.errors import SpecError
from quire_operator.resources import network_policy
from quire_operator.settings import Settings

_NAMESPACE = "kubernetes.io/metadata.name"


def build(**fields: Any) -> dict[str, resources.Manifest]:
    """The children of the minimal LLMDeployment with these fields, by kind."""
    children = resources.build(spec.parse(specs.minimal(**fields)), Settings(engine_image="quire-server:1"))
    return {child["kind"]: child for child in children}


@pytest.mark.parametrize(
    ("endpoint", "to", "port"),
    [
        (
            "http://otel.monitoring:4318",
            [{"namespaceSelector": {"matchLabels": {_NAMESPACE: "monitoring"}}}],
            4318,
        ),
        (
            "http://otel.ops.svc.cluster.local",
            [{"namespaceSelector": {"matchLabels": {_NAMESPACE: "ops"}}}],
            80,
        ),
        ("http://otel:4318", [{"podSelector": {}}], 4318),
        ("http://10.1.2.3:4318", [{"ipBlock": {"cidr": "10.1.2.3/32"}}], 4318),
        ("https://traces.example.com", network_policy.ANYWHERE, 443),
    ],
)
def test_tracing_allows_egress_to_the_collector_only(endpoint: str, to: Any, port: int) -> None:
    children = build(observability={"tracing": {"endpoint": endpoint, "samplingRatePerMillion": 10_000}})
    _dns, out = children["NetworkPolicy"]["spec"]["egress"]
    assert out.get("to") == to
    assert out["ports"] == [{"protocol": "TCP", "port": port}]
    data = children["ConfigMap"]["data"]
    assert (data["QUIRE_OTLP_ENDPOINT"], data["QUIRE_TRACE_SAMPLE_RATIO"]) == (endpoint, "0.01")
    assert "QUIRE_OTLP_ENDPOINT" not in build()["ConfigMap"]["data"]


def test_redaction_patterns_are_mounted_into_the_server() -> None:
    logging = {"mode": "Content", "redactConfigMapRef": {"name": "redaction"}}
    children = build(observability={"requestLogging": logging})
    pod = children["Deployment"]["spec"]["template"]["spec"]
    assert {"name": "log-redact", "configMap": {"name": "redaction"}} in pod["volumes"]
    mount = {"name": "log-redact", "mountPath": "/etc/quire/redact", "readOnly": True}
    assert mount in pod["containers"][0]["volumeMounts"]
    assert children["ConfigMap"]["data"]["QUIRE_LOG_REDACT_PATH"] == "/etc/quire/redact/patterns"
    assert children["ConfigMap"]["data"]["QUIRE_LOG_REQUESTS"] == "content"


@pytest.mark.parametrize("host", ["169.254.169.254", "169.254.1.2:4318"])
def test_a_link_local_address_is_refused_as_a_collector(host: str) -> None:
    with pytest.raises(SpecError, match="spec.observability.tracing.endpoint"):
        build(observability={"tracing": {"endpoint": f"http://{host}"}})
