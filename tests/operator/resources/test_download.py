"""A model that is downloaded in the pod: which container sees credentials, may write, may connect where."""

from __future__ import annotations

import json
from typing import Any

import pytest

from e2e.api import specs
from quire_operator import resources, spec
from quire_operator.errors import SpecError
from quire_operator.settings import Settings

SETTINGS = Settings(engine_image="registry.example/quire-server:1", credential_hosts=("*.example.com",))
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
def test_only_the_download_container_has_the_credentials(body: specs.Body, secret: str) -> None:
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
def test_the_server_mounts_the_model_read_only(body: specs.Body) -> None:
    built = pod(body)
    (served,) = [mount for mount in built["containers"][0]["volumeMounts"] if mount["name"] == "model"]
    assert served["readOnly"] is True


def test_a_hub_download_gets_its_endpoint_token_proxy_and_ca_certificate_as_variables() -> None:
    assert environment(HUB) == {
        "HTTPS_PROXY": "http://proxy.example.com:3128",
        "NO_PROXY": ".svc",
        "HF_TOKEN": {"secretKeyRef": {"name": "hub", "key": "token"}},
        "HF_ENDPOINT": "https://hub.example.com:8443",
        "SSL_CERT_FILE": "/etc/quire/ca/ca.crt",
    }


def test_an_s3_download_gets_its_endpoint_and_keys_as_the_standard_aws_variables() -> None:
    found = environment(S3)
    assert found["AWS_ENDPOINT_URL"] == "http://store.example.com:9000"
    assert found["AWS_SECRET_ACCESS_KEY"] == {
        "secretKeyRef": {"name": "store", "key": "AWS_SECRET_ACCESS_KEY"}
    }
    assert found["AWS_SESSION_TOKEN"]["secretKeyRef"]["optional"] is True


def test_egress_is_limited_to_the_ports_of_the_source_and_the_proxies() -> None:
    def ports(body: specs.Body) -> list[int]:
        rule = children(body)["NetworkPolicy"]["spec"]["egress"][-1]
        return [entry["port"] for entry in rule["ports"]]

    assert ports(HUB) == [443, 3128, 8443]
    assert ports(S3) == [443, 9000]
    own = {"oci": {"reference": "registry.example.com:5000/models/qwen3-8b:v1"}}
    assert ports(specs.merged(OCI, {"spec": {"model": {"source": own}}})) == [443, 5000]
    assert ports(specs.MINIMAL) == [53, 53]


def through(body: specs.Body, proxy: str, name: str = "HTTPS_PROXY") -> specs.Body:
    """The same download through a proxy."""
    env = [{"name": "NO_PROXY", "value": "evil.test:80/?"}, {"name": name, "value": proxy}]
    return specs.merged(body, {"spec": {"cache": {"download": {"env": env}}}})


def downloaded(source: specs.Body, **fields: Any) -> specs.Body:
    """A download of this source without credentials."""
    body = specs.minimal(cache={"mode": "None", "size": "1Gi"}, **fields)
    return {**body, "spec": {**body["spec"], "model": {"source": source}}}


IDENTITY = downloaded({"s3": {"uri": "s3://bucket/model"}}, security={"identity": {"workload": "EKS"}})


@pytest.mark.parametrize("body", (*specs.DOWNLOADED, IDENTITY), ids=specs.name_of)
@pytest.mark.parametrize(
    "proxy",
    [
        "http://evil.test",
        "http://[",
        "http://\u2100.example.com",
        "http://evil.test\\@a.example.com",
        "http://a.example.com@evil.test",
        "http://evil.test#.example.com",
        "http://evil.test\t.example.com",
        "http://evil.test%2f.example.com",
        "evil.test://a.example.com",
        "http://$(NO_PROXY).example.com",
    ],
)
def test_credentials_go_through_no_proxy_but_a_trusted_one(body: specs.Body, proxy: str) -> None:
    for name in ("HTTPS_PROXY", "all_proxy"):
        with pytest.raises(SpecError, match=r"^spec\.cache\.download\.env\[1\]\.value: "):
            children(through(body, proxy, name))


@pytest.mark.parametrize(
    "proxy",
    [
        "http://proxy.example.com:3128",
        "https://PROXY.example.com/",
        "proxy.example.com",
        "http://u:p@a.example.com",
    ],
)
def test_credentials_go_through_a_trusted_proxy(proxy: str) -> None:
    children(through(HUB, proxy))


@pytest.mark.parametrize("proxy", ["http://[", "http://\u2100.example.com", "http://a:99999", "nonsense"])
def test_without_credentials_a_proxy_that_is_no_address_opens_no_port(proxy: str) -> None:
    public = downloaded({"huggingFace": {"repo": "a/b"}})
    rule = children(through(public, proxy))["NetworkPolicy"]["spec"]["egress"][-1]
    assert [entry["port"] for entry in rule["ports"]] == [443]


def test_each_pod_gets_an_ephemeral_claim_or_an_empty_dir() -> None:
    def volume(body: specs.Body) -> dict[str, Any]:
        return next(entry for entry in pod(body)["volumes"] if entry["name"] == "model")

    claim = volume(HUB)["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert claim["resources"] == {"requests": {"storage": "20Gi"}}
    assert claim["storageClassName"] == "fast"
    assert volume(S3)["emptyDir"] == {"sizeLimit": "20Gi"}
    assert pod(HUB)["securityContext"]["fsGroup"] == 65532


def test_the_progress_deadline_includes_the_download_timeout() -> None:
    late = children(HUB)["Deployment"]["spec"]["progressDeadlineSeconds"]
    assert late - children(specs.MINIMAL)["Deployment"]["spec"]["progressDeadlineSeconds"] == 3600
