"""A model that is downloaded in the pod: which container sees credentials, may write, may connect where."""

from __future__ import annotations

import json
from typing import Any

import pytest

from e2e.api import specs
from quire_operator import resources, spec
from quire_operator.settings import Settings

SETTINGS = Settings(engine_image="registry.example/quire-server:1")
HUB, S3, GCS, OCI, SHARED, EXISTING = specs.DOWNLOADED
FOR_EACH_POD = (HUB, S3, GCS, OCI)


def children(body: specs.Body) -> dict[str, dict[str, Any]]:
    return {child["kind"]: child for child in resources.build(spec.parse(body), SETTINGS)}


def pod(body: specs.Body) -> dict[str, Any]:
    template = children(body)["Deployment"]["spec"]["template"]["spec"]
    assert isinstance(template, dict)
    return template


def environment(body: specs.Body) -> dict[str, Any]:
    env = pod(body)["initContainers"][0]["env"]
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in env}


@pytest.mark.parametrize(
    ("body", "secret"), [(HUB, "hub"), (S3, "store"), (GCS, "google"), (OCI, "pull")], ids=str
)
def test_credentials_are_in_the_container_that_downloads_and_nowhere_else(
    body: specs.Body, secret: str
) -> None:
    built = pod(body)
    server, fetcher = built["containers"][0], built["initContainers"][0]
    mounted = {volume["name"] for volume in built["volumes"] if "secret" in volume}
    assert mounted.isdisjoint(mount["name"] for mount in server["volumeMounts"])
    assert "secretKeyRef" not in json.dumps(server)
    assert secret not in json.dumps(fetcher["args"])
    in_environment = f'"name": "{secret}", "key"' in json.dumps(fetcher["env"]) if "env" in fetcher else False
    in_volume = mounted & {mount["name"] for mount in fetcher["volumeMounts"]}
    assert in_environment or in_volume


@pytest.mark.parametrize("body", FOR_EACH_POD, ids=specs.name_of)
def test_the_server_cannot_write_to_its_model(body: specs.Body) -> None:
    built = pod(body)
    (served,) = [mount for mount in built["containers"][0]["volumeMounts"] if mount["name"] == "model"]
    assert served["readOnly"] is True


def test_a_hub_is_asked_by_its_address_through_the_proxy_and_with_the_company_s_certificates() -> None:
    assert environment(HUB) == {
        "HTTPS_PROXY": "http://proxy.example.com:3128",
        "NO_PROXY": ".svc",
        "HF_TOKEN": {"secretKeyRef": {"name": "hub", "key": "token"}},
        "HF_ENDPOINT": "https://hub.example.com:8443",
        "SSL_CERT_FILE": "/etc/quire/ca/ca.crt",
    }


def test_a_store_finds_its_keys_under_their_usual_names() -> None:
    found = environment(S3)
    assert found["AWS_ENDPOINT_URL"] == "http://store.example.com:9000"
    assert found["AWS_SECRET_ACCESS_KEY"] == {
        "secretKeyRef": {"name": "store", "key": "AWS_SECRET_ACCESS_KEY"}
    }
    assert found["AWS_SESSION_TOKEN"]["secretKeyRef"]["optional"] is True


def test_only_the_ports_of_the_source_and_of_proxies_are_opened() -> None:
    def ports(body: specs.Body) -> list[int]:
        rule = children(body)["NetworkPolicy"]["spec"]["egress"][-1]
        return [entry["port"] for entry in rule["ports"]]

    assert ports(HUB) == [443, 3128, 8443]
    assert ports(S3) == [443, 9000]
    own = {"oci": {"reference": "registry.example.com:5000/models/qwen3-8b:v1"}}
    assert ports(specs.merged(OCI, {"spec": {"model": {"source": own}}})) == [443, 5000]
    assert ports(specs.MINIMAL) == [53, 53]


def test_each_pod_has_a_claim_of_its_own_or_its_node_s_disk() -> None:
    def volume(body: specs.Body) -> dict[str, Any]:
        return next(entry for entry in pod(body)["volumes"] if entry["name"] == "model")

    claim = volume(HUB)["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert claim["resources"] == {"requests": {"storage": "20Gi"}}
    assert claim["storageClassName"] == "fast"
    assert volume(S3)["emptyDir"] == {"sizeLimit": "20Gi"}
    assert pod(HUB)["securityContext"]["fsGroup"] == 65532


def test_a_rollout_allows_for_the_download() -> None:
    late = children(HUB)["Deployment"]["spec"]["progressDeadlineSeconds"]
    assert late - children(specs.MINIMAL)["Deployment"]["spec"]["progressDeadlineSeconds"] == 3600
