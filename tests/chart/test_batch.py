"""quire-batch in the chart: where its state is, who may connect to it, and what it may reach."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire_batch.settings import Settings
from quire_gateway.settings import Settings as GatewaySettings
from quire_http.environ import SettingsError
from tests.chart.helm import CHART, GATEWAY, IMAGES, MATRIX, PROMETHEUS, Body, named, of_kind, render, run

NAME = "quire-batch"
BATCH = (*GATEWAY, "--set", "batch.enabled=true")
SHARED = (
    *BATCH, "--set", "batch.replicas=3,batch.database.existingSecret=pg,batch.bucket.url=s3://b/p",
    "--set", "batch.bucket.existingSecret=s3-keys",
)  # fmt: skip
WEBHOOKS = (
    *BATCH, "--set", "batch.webhooks.allow={https://hooks.example.com}",
    "--set", "batch.webhooks.existingSecret=hooks",
)  # fmt: skip


def ours(bodies: list[Body]) -> list[Body]:
    return [b for b in bodies if b["metadata"].get("labels", {}).get("app.kubernetes.io/name") == NAME]


def pod(*values: str) -> Body:
    return dict(named(render(*values), "StatefulSet", NAME)["spec"]["template"]["spec"])


def environ(*values: str) -> dict[str, str]:
    (container,) = pod(*values)["containers"]
    return {each["name"]: each.get("value", "from-elsewhere") for each in container["env"]}


def refusal(*values: str) -> str:
    done = run("template", "quire", str(CHART), "--kube-version", "1.34.0", *IMAGES, *values)
    assert done.returncode != 0
    return done.stderr


@pytest.mark.parametrize("name", [name for name in MATRIX if name != "batch"])
def test_nothing_of_it_is_rendered_unless_it_is_enabled(name: str) -> None:
    bodies = [body for body in render(*MATRIX[name]) if body["kind"] != "PrometheusRule"]  # of all parts
    assert bodies and NAME not in str(bodies)


def test_these_are_its_objects() -> None:
    assert sorted(body["kind"] for body in ours(render(*BATCH))) == [
        "NetworkPolicy",
        "Service",
        "StatefulSet",
    ]
    kinds = [body["kind"] for body in ours(render(*SHARED, *PROMETHEUS))]
    assert sorted(kinds) == ["NetworkPolicy", "PodDisruptionBudget", "PodMonitor", "Service", "StatefulSet"]


def test_it_parses_the_environment_that_the_chart_renders() -> None:
    read = Settings.from_environ(environ(*BATCH))
    assert read.gateway_url == "http://quire-gateway"
    assert (read.database_url, read.bucket, read.webhooks) == ("", "", frozenset())
    assert (read.quotas.file_bytes, read.quotas.client_bytes) == (200 << 20, 2 << 30)
    assert (read.quotas.lines, read.quotas.batches, read.quotas.jobs) == (50_000, 20, 1_000)
    assert read.quotas == type(read.quotas)() and read.concurrency == Settings.concurrency


def test_the_gateway_finds_it_and_both_have_the_public_keys() -> None:
    bodies = render(*BATCH)
    (container,) = named(bodies, "Deployment", "quire-gateway")["spec"]["template"]["spec"]["containers"]
    given = {each["name"]: each.get("value", "from-elsewhere") for each in container["env"]}
    read = GatewaySettings.from_environ({**given, "KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    assert read.batch_url == f"http://{named(bodies, 'Service', NAME)['metadata']['name']}"
    assert str(read.public_keys) in {each["mountPath"] for each in container["volumeMounts"]}
    keys = {body["metadata"]["namespace"]: body["metadata"]["name"] for body in of_kind(bodies, "ConfigMap")
            if body["metadata"]["name"].endswith("-public-keys")}  # fmt: skip
    assert set(keys) == {"team-a", "quire-system"}
    (volume,) = (each for each in pod(*BATCH)["volumes"] if each["name"] == "public-keys")
    assert volume["configMap"]["name"] == keys["quire-system"]


def test_its_state_is_on_a_claim_unless_it_is_elsewhere() -> None:
    (claim,) = named(render(*BATCH), "StatefulSet", NAME)["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "20Gi"
    (container,) = pod(*BATCH)["containers"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounts[claim["metadata"]["name"]] == environ(*BATCH)["QUIRE_BATCH_DIR"]

    shared = named(render(*SHARED), "StatefulSet", NAME)["spec"]
    assert "volumeClaimTemplates" not in shared and shared["replicas"] == 3
    assert pod(*SHARED)["containers"][0]["envFrom"] == [{"secretRef": {"name": "s3-keys"}}]
    assert (
        "volumeClaimTemplates"
        in named(render(*BATCH, "--set", "batch.bucket.url=s3://b"), "StatefulSet", NAME)["spec"]
    )


def test_secrets_are_files_that_no_argument_and_no_variable_has() -> None:
    for values, name, secret in ((SHARED, "database", "pg"), (WEBHOOKS, "webhooks", "hooks")):
        spec = pod(*values)
        (volume,) = (each for each in spec["volumes"] if each["name"] == name)
        assert volume["secret"]["secretName"] == secret
        (mount,) = (each for each in spec["containers"][0]["volumeMounts"] if each["name"] == name)
        files = {f"{mount['mountPath']}/{item['path']}" for item in volume["secret"]["items"]}
        assert files & set(environ(*values).values()), "the variable names the file"
    with pytest.raises(SettingsError, match="/etc/quire/database/url cannot be read"):
        Settings.from_environ(environ(*SHARED))


def test_only_the_gateway_and_prometheus_come_in_and_only_what_is_named_is_reached() -> None:
    extra = "batch.egress[0].to[0].ipBlock.cidr=10.1.2.3/32,batch.egress[0].ports[0].port=5432"
    bodies = render(*BATCH, "--set", extra)
    policy = named(bodies, "NetworkPolicy", NAME)["spec"]
    gateway = named(bodies, "Deployment", "quire-gateway")["spec"]["template"]["metadata"]["labels"]
    (rule,) = policy["ingress"]
    assert [set(peer) for peer in rule["from"]] == [{"podSelector"}, {"namespaceSelector"}]
    assert rule["from"][0]["podSelector"]["matchLabels"].items() <= gateway.items()
    to_gateway, dns, named_one = policy["egress"]
    assert to_gateway["to"][0]["podSelector"]["matchLabels"].items() <= gateway.items()
    assert {each["port"] for each in dns["ports"]} == {53}
    assert named_one["to"] == [{"ipBlock": {"cidr": "10.1.2.3/32"}}]
    mine = named(bodies, "StatefulSet", NAME)["spec"]["template"]["metadata"]["labels"]
    out = named(bodies, "NetworkPolicy", "quire-gateway")["spec"]["egress"]
    peers = [peer for each in out for peer in each.get("to", ()) if set(peer) == {"podSelector"}]
    assert any(peer["podSelector"]["matchLabels"].items() <= mine.items() for peer in peers)


def test_its_pod_is_restricted_and_has_no_token_of_the_api_server() -> None:
    spec = pod(*BATCH)
    (container,) = spec["containers"]
    assert spec["automountServiceAccountToken"] is False
    assert container["command"] == ["quire-batch"]
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"] and security["capabilities"] == {"drop": ["ALL"]}
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["terminationGracePeriodSeconds"] > Settings.drain_seconds + 10
    gateway = named(render(*BATCH), "Deployment", "quire-gateway")["spec"]["template"]["spec"]
    assert container["image"] == gateway["containers"][0]["image"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (("--set", "batch.enabled=true"), "batch.enabled needs gateway.enabled"),
        ((*BATCH, "--set", "gateway.signingKey.enabled=false"), "batch.enabled needs gateway.enabled"),
        ((*BATCH, "--set", "batch.replicas=2"), "batch.replicas above 1 needs"),
        ((*BATCH, "--set", "batch.webhooks.allow={https://a.example}"), "batch.webhooks.existingSecret"),
        ((*WEBHOOKS, "--set", "batch.webhooks.allow={https://a.example/path}"), "allow"),
        ((*BATCH, "--set", "batch.bucket.url=gs://b"), "url"),
        ((*BATCH, "--set", "batch.nonsense=1"), "nonsense"),
    ],
)
def test_values_that_do_not_go_together_are_refused(values: tuple[str, ...], said: str) -> None:
    assert said in refusal(*values)


def test_the_program_of_the_image_is_the_one_that_the_chart_starts() -> None:
    dockerfile = (Path(__file__).parents[2] / "server/gateway.Dockerfile").read_text(encoding="utf-8")
    assert "for each in batch gateway" in dockerfile
