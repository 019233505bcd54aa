"""The metrics adapter in the chart: where it is, what it may do, and that all its parts name each other."""

from __future__ import annotations

import pytest

from quire_metrics_adapter import discovery
from quire_metrics_adapter.settings import Settings
from quire_operator.settings import Settings as OperatorSettings
from tests.chart.helm import MATRIX, Body, named, of_kind, render
from tests.chart.test_rights import granted

NAME = "quire-metrics-adapter"
WITH_ADAPTER = [name for name in MATRIX if name not in ("namespaced", "no adapter")]


def ours(bodies: list[Body]) -> list[Body]:
    return [b for b in bodies if b["metadata"].get("labels", {}).get("app.kubernetes.io/name") == NAME]


@pytest.mark.parametrize("name", ["namespaced", "no adapter"])
def test_the_adapter_is_not_rendered_when_disabled_or_namespaced(name: str) -> None:
    bodies = render(*MATRIX[name])

    assert ours(bodies) == []
    assert of_kind(bodies, "APIService") == []
    assert NAME not in str(bodies)


@pytest.mark.parametrize("name", WITH_ADAPTER)
def test_the_api_services_and_the_service_select_the_adapters_pods(name: str) -> None:
    bodies = render(*MATRIX[name])
    pod = named(bodies, "Deployment", NAME)["spec"]["template"]
    service = named(bodies, "Service", NAME)["spec"]
    (container,) = pod["spec"]["containers"]
    port, plain = service["ports"]

    assert {b["metadata"]["name"] for b in of_kind(bodies, "APIService")} == set(discovery.API_SERVICES)
    for api in of_kind(bodies, "APIService"):
        assert api["spec"]["service"] == {"name": NAME, "namespace": "quire-system", "port": port["port"]}
        assert "caBundle" not in api["spec"] and "insecureSkipTLSVerify" not in api["spec"]
    assert service["selector"].items() <= pod["metadata"]["labels"].items()
    assert {port["targetPort"], plain["targetPort"]} == {p["name"] for p in container["ports"]}


@pytest.mark.parametrize("name", MATRIX)
def test_the_operator_gets_the_adapters_load_url_and_keda_is_admitted_by_the_network_policy(
    name: str,
) -> None:
    bodies = render(*MATRIX[name])
    (operator,) = named(bodies, "Deployment", "quire-operator")["spec"]["template"]["spec"]["containers"]
    environ = {"QUIRE_ENGINE_IMAGE": "x:1"} | {e["name"]: e.get("value", "x") for e in operator["env"]}
    url = OperatorSettings.from_environ(environ).load_url
    policies = [b for b in ours(bodies) if b["kind"] == "NetworkPolicy"]

    if name not in WITH_ADAPTER:
        assert url == ""
        return
    service = named(bodies, "Service", NAME)
    (plain,) = [p for p in service["spec"]["ports"] if p["targetPort"] == "metrics"]
    assert url == f"http://{NAME}.{service['metadata']['namespace']}.svc:{plain['port']}/load"
    for policy in policies:
        (rule,) = [r for r in policy["spec"]["ingress"] if r["ports"][0]["port"] == 8080]
        labels = [place["namespaceSelector"]["matchLabels"] for place in rule["from"]]
        assert {"kubernetes.io/metadata.name": "keda"} in labels


def test_the_newer_api_version_has_the_higher_priority() -> None:
    priority = {b["spec"]["version"]: b["spec"]["versionPriority"] for b in of_kind(render(), "APIService")}

    assert sorted(priority, key=lambda version: -priority[version]) == list(discovery.VERSIONS)


@pytest.mark.parametrize("name", WITH_ADAPTER)
def test_the_adapter_parses_the_environment_that_the_chart_renders(name: str) -> None:
    (container,) = named(render(*MATRIX[name]), "Deployment", NAME)["spec"]["template"]["spec"]["containers"]
    given = {e["name"]: e.get("value", "from-the-pod") for e in container["env"]}
    settings = Settings.from_environ(given)
    ports = {p["name"]: p["containerPort"] for p in container["ports"]}

    assert container["command"] == [NAME]
    assert settings.service == NAME
    assert {"https": settings.port, "metrics": settings.probe_port} == ports
    assert (settings.tls_directory is not None) == (name == "cert-manager")


def test_the_adapter_has_exactly_the_rights_that_its_code_uses() -> None:
    bodies = [b for b in ours(render()) if "rules" in b]
    (role,) = bodies
    (api_services,) = [r for r in role["rules"] if "apiservices" in r["resources"]]

    assert role["kind"] == "ClusterRole"
    assert granted(role) == {
        ("", "pods"): {"list", "watch"},
        ("apps", "deployments"): {"list"},
        ("apps", "replicasets"): {"list"},
        ("apps", "statefulsets"): {"list"},
        ("leaderworkerset.x-k8s.io", "leaderworkersets"): {"list"},
        ("serving.quire.dev", "llmdeployments"): {"list"},
        ("apiregistration.k8s.io", "apiservices"): {"get", "patch"},
    }
    assert set(api_services["resourceNames"]) == set(discovery.API_SERVICES)


def test_the_adapter_is_bound_to_its_own_role_and_to_the_two_for_aggregated_apis() -> None:
    bodies = ours(render())
    bindings = [*of_kind(bodies, "ClusterRoleBinding"), *of_kind(bodies, "RoleBinding")]
    bound = {(b["roleRef"]["name"], b["metadata"].get("namespace")) for b in bindings}

    assert bound == {
        (NAME, None),
        ("system:auth-delegator", None),
        ("extension-apiserver-authentication-reader", "kube-system"),
    }
    assert {s["name"] for b in bindings for s in b["subjects"]} == {NAME}


def test_with_a_certificate_from_a_secret_the_adapter_has_no_right_on_api_services() -> None:
    bodies = render(*MATRIX["cert-manager"])
    (role,) = [b for b in ours(bodies) if "rules" in b]

    assert ("apiregistration.k8s.io", "apiservices") not in granted(role)
    for api in of_kind(bodies, "APIService"):
        assert api["metadata"]["annotations"] == {"cert-manager.io/inject-ca-from": "quire-system/x"}


def test_the_network_policy_allows_egress_to_model_server_pods_only() -> None:
    policy = named(render(), "NetworkPolicy", NAME)["spec"]
    (to_pods,) = [rule for rule in policy["egress"] if "to" in rule]

    assert to_pods["ports"] == [{"port": 8000, "protocol": "TCP"}]
    assert to_pods["to"][0]["podSelector"]["matchLabels"] == {
        "app.kubernetes.io/managed-by": "quire-operator"
    }
    assert {p["port"] for rule in policy["ingress"] for p in rule["ports"]} == {6443, 8080}
