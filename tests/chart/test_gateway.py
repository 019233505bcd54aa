"""The gateway in the chart: whose models it serves, what it may do, and that its drain fits its pod's end."""

from __future__ import annotations

import base64
import time
from pathlib import Path

import pytest

from e2e.api import specs
from quire_gateway.request_signing import TOKEN_HEADER, Identity, RequestSigner
from quire_gateway.settings import Settings
from quire_operator import resources
from quire_operator.settings import Settings as OperatorSettings
from quire_operator.spec import parse as parse_spec
from quire_server.api.gateway_tokens import GatewayKeys
from tests.chart.helm import (
    CHART,
    GATEWAY,
    IMAGES,
    MATRIX,
    PROMETHEUS,
    Body,
    named,
    of_kind,
    parse,
    render,
    run,
    template,
)
from tests.chart.test_rights import granted

OPERATOR = OperatorSettings(engine_image="quire-server:1")
KINDS = ("llmroutes", "llmclients", "llmexternalbackends", "llmdeployments")
RIGHTS = {
    ("discovery.k8s.io", "endpointslices"): {"list", "watch"},
    **{("serving.quire.dev", kind): {"list", "watch"} for kind in KINDS},
    **{("serving.quire.dev", f"{kind}/status"): {"patch"} for kind in KINDS[:3]},
    ("events.k8s.io", "events"): {"create"},
}
LEASES = {("coordination.k8s.io", "leases"): {"create", "patch", "list", "watch", "delete"}}

NAME = "quire-gateway"
WITH_GATEWAY = ("batch", "gateway", "one gateway", "prometheus", "bare", "everything")


def ours(bodies: list[Body]) -> list[Body]:
    return [b for b in bodies if b["metadata"].get("labels", {}).get("app.kubernetes.io/name") == NAME]


def pod(*values: str) -> Body:
    return dict(named(render(*values), "Deployment", NAME)["spec"]["template"]["spec"])


def settings(*values: str) -> Settings:
    """As the gateway reads them in its pod."""
    (container,) = pod(*values)["containers"]
    environ = {each["name"]: each.get("value", "from-elsewhere") for each in container["env"]}
    return Settings.from_environ({**environ, "KUBERNETES_SERVICE_HOST": "10.0.0.1"})


def refusal(values: str) -> str:
    """Why Helm does not render a gateway with these values."""
    chart = ("template", "quire", str(CHART), "--kube-version", "1.34.0")
    done = run(*chart, *IMAGES, *GATEWAY, "--set", values)
    assert done.returncode != 0
    return done.stderr


def kinds(bodies: list[Body]) -> list[str]:
    return sorted(body["kind"] for body in bodies)


@pytest.mark.parametrize("name", [name for name in MATRIX if name not in WITH_GATEWAY])
def test_nothing_of_the_gateway_is_rendered_unless_it_is_enabled(name: str) -> None:
    assert NAME not in str(render(*MATRIX[name]))


def test_these_are_the_objects_of_a_gateway() -> None:
    usual = ["Deployment", "HorizontalPodAutoscaler", "NetworkPolicy", "PodDisruptionBudget", "Role"]
    usual = sorted(
        ["ConfigMap", *usual, "Role", "RoleBinding", "RoleBinding", "Service", "Service", "ServiceAccount"]
    )
    assert kinds(ours(render(*GATEWAY))) == usual
    left_out = ("ConfigMap", "HorizontalPodAutoscaler", "PodDisruptionBudget")
    single = [kind for kind in usual if kind not in left_out]
    single.remove("Service")  # that for peers
    assert kinds(ours(render(*MATRIX["one gateway"]))) == single
    bare = ["ConfigMap", "Deployment", "HorizontalPodAutoscaler", "Service", "Service"]
    assert kinds(ours(render(*MATRIX["bare"]))) == bare
    assert kinds(ours(render(*PROMETHEUS, *GATEWAY))) == sorted([*usual, "PodMonitor"])


@pytest.mark.parametrize("name", WITH_GATEWAY)
def test_the_gateway_parses_the_environment_that_the_chart_renders(name: str) -> None:
    (container,) = pod(*MATRIX[name])["containers"]
    read = settings(*MATRIX[name])

    assert read.namespaces == ("team-a",)
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert read.port == ports.pop("http")
    assert read.log_level == ("debug" if name == "everything" else "info")
    assert "command" not in container, "the image starts it"
    if name == "one gateway":
        assert read.signing_key is None and "volumes" not in pod(*MATRIX[name])
        assert not read.peer_service and not ports
    else:
        mount, volume = container["volumeMounts"][0], pod(*MATRIX[name])["volumes"][0]
        assert str(read.signing_key) == f"{mount['mountPath']}/tls.key"
        assert volume["secret"]["secretName"] == "my-key"
        assert {"peers": read.peer_port} == ports
        service = named(render(*MATRIX[name]), "Service", read.peer_service)["spec"]
        assert (service["clusterIP"], service["ports"][0]["targetPort"]) == ("None", "peers")


def test_the_url_of_a_limit_store_is_a_mounted_file_and_its_port_is_open() -> None:
    store = "gateway.limitStore.urlSecretRef.name=valkey,gateway.limitStore.onLoss=Deny"
    values = (*GATEWAY, "--set", f"{store},gateway.limitStore.port=6380")
    read, bare = settings(*values), settings(*GATEWAY)
    (container,) = pod(*values)["containers"]
    (volume,) = [one for one in pod(*values)["volumes"] if one["name"] == "limit-store"]
    (mount,) = [one for one in container["volumeMounts"] if one["name"] == "limit-store"]

    assert str(read.limit_store_url) == f"{mount['mountPath']}/url" and read.denies_without_store
    assert volume["secret"]["secretName"] == "valkey" and mount["readOnly"]
    assert "valkey" not in str(container["env"]), "nothing of the Secret is in the environment"
    ports = [
        port["port"]
        for rule in named(render(*values), "NetworkPolicy", NAME)["spec"]["egress"]
        for port in rule.get("ports", ())
    ]
    assert 6380 in ports
    assert bare.limit_store_url is None and "limit-store" not in str(pod(*GATEWAY))


def collector(*values: str) -> list[Body]:
    """Where the gateway may connect to because of its collector."""
    rules = [named(render(*GATEWAY, *each), "NetworkPolicy", NAME)["spec"]["egress"] for each in (values, ())]
    return [rule for rule in rules[0] if rule not in rules[1]]


@pytest.mark.parametrize(
    "endpoint",
    [
        "http://otel.monitoring:4318",
        "http://otel.ops.svc.cluster.local",
        "http://otel:4318",
        "http://10.1.2.3:4318",
        "https://traces.example.com",
    ],
)
def test_traces_go_to_the_collector_alone_by_the_rule_that_the_operator_has_for_model_servers(
    endpoint: str,
) -> None:
    values = ("--set", f"gateway.tracing.endpoint={endpoint},gateway.tracing.samplingRatePerMillion=10000")
    read = settings(*GATEWAY, *values)
    assert (read.otlp_endpoint, read.trace_sample_ratio) == (endpoint, 0.01)
    tracing = {"tracing": {"endpoint": endpoint}}
    model = resources.build(parse_spec(specs.minimal(observability=tracing)), OPERATOR)
    (policy,) = [child for child in model if child["kind"] == "NetworkPolicy"]
    (rule,) = collector(*values)
    assert rule == policy["spec"]["egress"][1]


def test_without_a_collector_there_are_no_traces_and_what_is_no_address_is_rejected() -> None:
    read = settings(*GATEWAY)
    assert (read.otlp_endpoint, collector()) == ("", [])
    assert "endpoint" in refusal("gateway.tracing.endpoint=collector:4318")


def test_a_policy_for_a_lost_limit_store_that_does_not_exist_is_rejected() -> None:
    assert "onLoss" in refusal("gateway.limitStore.onLoss=Panic")


@pytest.mark.parametrize("required", [False, True])
def test_keys_are_required_where_the_chart_says_so(required: bool) -> None:
    values = (*GATEWAY, "--set", f"gateway.requireKeys={str(required).lower()}")
    assert settings(*values).require_keys is required


def test_the_pod_ends_no_sooner_than_its_drain() -> None:
    for values in (GATEWAY, (*GATEWAY, "--set", "gateway.drainSeconds=600")):
        spec, read = pod(*values), settings(*values)
        (container,) = spec["containers"]
        pre_stop = container["lifecycle"]["preStop"]["sleep"]["seconds"]

        assert read.pre_stop_seconds == pre_stop > 0
        assert spec["terminationGracePeriodSeconds"] >= pre_stop + read.drain_seconds + 5
    assert settings(*values).drain_seconds == 600


def test_the_service_the_autoscaler_and_the_budget_are_of_the_gateway_s_pods() -> None:
    bodies = render(*GATEWAY)
    deployment = named(bodies, "Deployment", NAME)["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    (container,) = deployment["template"]["spec"]["containers"]
    scaler = named(bodies, "HorizontalPodAutoscaler", NAME)["spec"]

    assert "replicas" not in deployment, "it is the autoscaler's"
    assert (scaler["scaleTargetRef"]["name"], scaler["minReplicas"], scaler["maxReplicas"]) == (NAME, 2, 10)
    assert scaler["metrics"][0]["containerResource"]["container"] == container["name"]
    service = named(bodies, "Service", NAME)["spec"]
    assert service["selector"].items() <= labels.items()
    assert service["ports"][0]["targetPort"] == container["ports"][0]["name"]
    budget = named(bodies, "PodDisruptionBudget", NAME)["spec"]
    assert budget["selector"]["matchLabels"].items() <= labels.items()
    for probe in ("readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == container["ports"][0]["name"]
    assert {each["topologyKey"] for each in deployment["template"]["spec"]["topologySpreadConstraints"]} == {
        "kubernetes.io/hostname",
        "topology.kubernetes.io/zone",
    }


def test_it_may_watch_its_kinds_write_their_status_and_leases_in_its_own_namespace_and_nothing_else() -> None:
    bodies = ours(render(*GATEWAY, "--set", "gateway.namespaces={team-a,team-b}"))
    roles, bindings = of_kind(bodies, "Role"), of_kind(bodies, "RoleBinding")

    assert of_kind(bodies, "ClusterRole") == []
    assert [role["metadata"]["namespace"] for role in roles] == ["team-a", "team-b", "quire-system"]
    for role, binding in zip(roles, bindings, strict=True):
        assert granted(role) == RIGHTS | (LEASES if role["metadata"]["namespace"] == "quire-system" else {})
        assert binding["metadata"]["namespace"] == role["metadata"]["namespace"]
        (subject,) = binding["subjects"]
        assert (subject["name"], subject["namespace"]) == (NAME, "quire-system")
    assert pod(*GATEWAY)["serviceAccountName"] == NAME


def test_it_serves_the_watched_namespaces_unless_others_are_named_and_never_all() -> None:
    watched = ("--set", "watchNamespaces={team-b,team-c}", "--set", "gateway.namespaces=null")
    assert settings(*GATEWAY, *watched).namespaces == ("team-b", "team-c")

    remedy = "set gateway.namespaces to the namespaces whose models the gateway serves"
    assert remedy in refusal("gateway.namespaces=null")


def test_a_gateway_without_an_image_is_rejected_with_a_remedy() -> None:
    remedy = "such as --set gateway.image.repository=registry.example.com/team/quire-gateway"
    assert remedy in refusal("gateway.image.repository=")


EXTERNAL = (
    "--set-json",
    'gateway.externalSecrets=[{"name":"openai","hosts":["api.openai.com"],"namespaces":["team-a"]},{"name":"b","hosts":["*.b.com"]}]',
    "--set-json",
    'gateway.externalEgress=[{"cidr":"0.0.0.0/0","except":["10.0.0.0/8"]},{"cidr":"10.20.0.0/16","ports":[8443]}]',
    "--set-json",
    'gateway.externalPrivateNetworks=["10.20.0.0/16","fd00::/8"]',
)


@pytest.mark.parametrize("name", ["gateway", "one gateway"])
def test_secrets_of_external_backends_are_mounted_where_the_gateway_reads_them(name: str) -> None:
    values = (*MATRIX[name], *EXTERNAL)
    read, spec = settings(*values), pod(*values)
    assert [(one.name, one.hosts, one.namespaces) for one in read.external_secrets] == [
        ("openai", ("api.openai.com",), ("team-a",)),
        ("b", ("*.b.com",), ()),
    ]
    assert [str(one) for one in read.external_networks] == ["10.20.0.0/16", "fd00::/8"]
    mounts = {each["name"]: each for each in spec["containers"][0]["volumeMounts"]}
    volumes = {each["name"]: each["secret"] for each in spec["volumes"]}
    assert mounts.keys() == volumes.keys()
    found = {volume["secretName"]: mounts[name]["mountPath"] for name, volume in volumes.items()}
    for secret in read.external_secrets:
        assert found[secret.name] == str(read.external_secrets_dir / secret.name)
    assert all(volume["optional"] for name, volume in volumes.items() if name.startswith("external"))
    plain = settings(*MATRIX[name])
    assert plain.external_secrets == plain.external_networks == ()


def test_the_network_policy_opens_what_the_values_say_and_else_nothing_outside() -> None:
    def outside(*values: str) -> list[Body]:
        policy = named(render(*GATEWAY, *values), "NetworkPolicy", NAME)["spec"]
        return [rule for rule in policy["egress"] if "ipBlock" in str(rule)]

    assert outside() == []
    whole, private = outside(*EXTERNAL)
    assert whole["to"] == [{"ipBlock": {"cidr": "0.0.0.0/0", "except": ["10.0.0.0/8"]}}]
    assert whole["ports"] == [{"port": 443, "protocol": "TCP"}]
    assert private["to"] == [{"ipBlock": {"cidr": "10.20.0.0/16"}}]
    assert private["ports"] == [{"port": 8443, "protocol": "TCP"}]


@pytest.mark.parametrize(
    "values",
    [
        'gateway.externalSecrets=[{"name":"openai"}]',
        'gateway.externalSecrets=[{"name":"openai","hosts":[]}]',
        'gateway.externalSecrets=[{"name":"openai","hosts":["*"]}]',
        'gateway.externalEgress=[{"cidr":"everywhere"}]',
        'gateway.externalPrivateNetworks=["10.0.0.1"]',
    ],
)
def test_a_secret_needs_its_hosts_and_a_network_its_mask(values: str) -> None:
    chart = ("template", "quire", str(CHART), "--kube-version", "1.34.0")
    done = run(*chart, *IMAGES, *GATEWAY, "--set-json", values)
    assert done.returncode != 0 and values.partition("=")[0].removeprefix("gateway.") in done.stderr


def keys_in(bodies: list[Body]) -> dict[str, dict[str, str]]:
    """The public keys in each namespace."""
    return {body["metadata"]["namespace"]: body["data"] for body in of_kind(ours(bodies), "ConfigMap")}


def operator_settings(bodies: list[Body]) -> OperatorSettings:
    (container,) = named(bodies, "Deployment", "quire-operator")["spec"]["template"]["spec"]["containers"]
    return OperatorSettings.from_environ({e["name"]: e.get("value", "x") for e in container["env"]})


def test_the_public_keys_are_in_each_namespace_and_the_operator_has_them_mounted_there_alone() -> None:
    bodies = render(*GATEWAY, "--set", "gateway.namespaces={team-a,team-b}")
    (name,) = {body["metadata"]["name"] for body in of_kind(ours(bodies), "ConfigMap")}
    settings = operator_settings(bodies)

    assert set(keys_in(bodies)) == {"team-a", "team-b"}
    assert [settings.gateway_keys(each) for each in ("team-a", "team-b", "team-c")] == [name, name, ""]
    assert operator_settings(render()).gateway_keys("team-a") == ""
    assert operator_settings(render(*MATRIX["one gateway"])).gateway_keys("team-a") == ""


def test_a_key_of_one_s_own_needs_its_public_key_and_makes_no_secret() -> None:
    assert of_kind(render(*GATEWAY), "Secret") == []
    assert keys_in(render(*GATEWAY)) == {"team-a": {"current.pem": "-----BEGIN PUBLIC KEY-----a"}}

    remedy = "set gateway.signingKey.publicKeys to the public keys of gateway.signingKey.existingSecret"
    assert remedy in refusal("gateway.signingKey.publicKeys=null")


def test_helm_generates_a_key_pair_whose_halves_belong_together(tmp_path: Path) -> None:
    """What the gateway signs with it is accepted by the engine that has what is public of it."""
    bodies = parse(template(*GATEWAY, "--set", "gateway.signingKey.existingSecret="))
    (secret,) = of_kind(bodies, "Secret")
    assert secret["metadata"]["name"] == pod_secret(bodies)
    private = tmp_path / "tls.key"
    private.write_bytes(base64.b64decode(secret["data"]["tls.key"]))
    public = tmp_path / "public"
    public.mkdir()
    for name, text in keys_in(bodies)["team-a"].items():
        (public / name).write_text(text, encoding="utf-8")
    assert set(keys_in(bodies)["team-a"]) == {"generated.pem", "current.pem"}
    assert "PRIVATE" not in str(keys_in(bodies))

    token = RequestSigner(private).token("team-a/qwen", Identity("alice"), "qwen")
    trusted = GatewayKeys(public, "team-a/qwen", time.monotonic, time.time)
    principal = trusted.principal_of({"headers": [(TOKEN_HEADER.encode(), token.encode())]})
    assert principal is not None and principal.client == "alice"


def pod_secret(bodies: list[Body]) -> str:
    (volume,) = named(bodies, "Deployment", NAME)["spec"]["template"]["spec"]["volumes"]
    return str(volume["secret"]["secretName"])
