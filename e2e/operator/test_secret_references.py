"""With `secretReferences: Labelled` an LLMDeployment can name only Secrets whose owner has labelled them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from e2e.cluster.apiserver import ApiServer
from e2e.operator import rights
from e2e.operator.process import OperatorProcess
from e2e.operator.world import Body, World
from e2e.waiting import eventually

pytestmark = pytest.mark.api

NAMESPACE = "labelled-a"
SECRETS = "/api/v1/namespaces/{}/secrets"
KEY = {"name": "theirs", "key": "k"}
CACHE = {"mode": "None", "size": "1Gi"}
# By the field that names the Secret.
SPECS: dict[str, Body] = {
    "spec.model.source.huggingFace.tokenSecretRef.name": {
        "model": {"source": {"huggingFace": {"repo": "a/b", "tokenSecretRef": KEY}}},
        "cache": CACHE,
    },
    "spec.model.source.s3.credentialsSecretRef.name": {
        "model": {"source": {"s3": {"uri": "s3://models/m", "credentialsSecretRef": {"name": "theirs"}}}},
        "cache": CACHE,
    },
    "spec.model.source.gcs.credentialsSecretRef.name": {
        "model": {"source": {"gcs": {"uri": "gs://models/m", "credentialsSecretRef": KEY}}},
        "cache": CACHE,
    },
    "spec.model.source.oci.pullSecretRef.name": {
        "model": {"source": {"oci": {"reference": "r.example/m:1", "pullSecretRef": {"name": "theirs"}}}},
        "cache": CACHE,
    },
    "spec.engine.watermark.keySecretRef.name": {
        "engine": {"watermark": {"mode": "Always", "keySecretRef": KEY}},
    },
    "spec.parallelism.authSecretRef.name": {"parallelism": {"authSecretRef": {"name": "theirs"}}},
    "spec.security.apiKeysSecretRef.name": {"security": {"apiKeysSecretRef": {"name": "theirs"}}},
}


@pytest.mark.deep
def test_a_secret_can_be_named_once_its_owner_has_labelled_it(
    server: ApiServer, world: World, tmp_path: Path
) -> None:
    world.namespace(NAMESPACE)
    chart = rights.rendered_chart(
        "--set", f"secretReferences=Labelled,watchNamespaces={{{NAMESPACE}}}", release="labelled"
    )
    rights.install(world, [body for body in chart if not body["kind"].startswith("Cluster")])
    (environment,) = [
        {entry["name"]: entry.get("value", "") for entry in container["env"]}
        for body in chart
        if body["kind"] == "Deployment"
        for container in body["spec"]["template"]["spec"]["containers"]
    ]
    given = {name: environment[name] for name in ("QUIRE_WATCH_NAMESPACES", "QUIRE_SECRET_REFERENCES")}
    kubeconfig = rights.token_kubeconfig(server, world, "labelled-operator", tmp_path / "kubeconfig")
    secret = {"metadata": {"name": "theirs"}, "stringData": {"k": "v"}}
    world.client.request("POST", SECRETS.format(NAMESPACE), secret)

    operator = OperatorProcess("labelled", kubeconfig, tmp_path, **given).start()
    try:
        operator.wait_leading(world)
        fields = {f"m{number}": field for number, field in enumerate(SPECS)}
        for name, field in fields.items():
            world.deploy(NAMESPACE, name, **SPECS[field])
        for name, field in fields.items():
            ready = world.wait_condition(NAMESPACE, name, "Ready", "False", "ReferenceRefused")
            assert f"{field}: Secret theirs" in ready["message"]
            assert "kubectl label" in ready["message"]
            assert world.get("Service", NAMESPACE, name) is None, "nothing is applied"

        labels = {"serving.quire.dev/referable": "true"}
        path = f"{SECRETS.format(NAMESPACE)}/theirs"
        world.client.request("PATCH", path, {"metadata": {"labels": labels}}, "application/merge-patch+json")
        for name in fields:
            eventually(f"{name} has its children", partial(world.has_children, NAMESPACE, name))
    finally:
        operator.stop()
