"""A model that is downloaded once for all pods: its claim, its Job, and what the pods mount."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from e2e.api import specs
from quire_operator import resources, spec
from quire_operator.settings import Settings

SETTINGS = Settings(engine_image="registry.example/quire-server:1", credential_hosts=("*.example.com",))
SHARED, EXISTING = specs.DOWNLOADED[4:]


def children(body: specs.Body, **patch: Any) -> dict[str, dict[str, Any]]:
    built = resources.build(spec.parse(specs.merged(body, {"spec": patch})), SETTINGS)
    policies = [child for child in built if child["kind"] == "NetworkPolicy"]
    return {child["kind"]: child for child in built} | {
        "Job policy": policies[-1],
        "NetworkPolicy": policies[0],
    }


def template(child: dict[str, Any]) -> dict[str, Any]:
    found = child["spec"]["template"]["spec"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(("body", "secret"), [(SHARED, "hub"), (EXISTING, "store")], ids=["made", "given"])
def test_only_the_download_job_has_the_credentials_and_write_access(body: specs.Body, secret: str) -> None:
    built = children(body)
    server, fetcher = template(built["Deployment"]), template(built["Job"])
    assert f'"name": "{secret}"' in json.dumps(fetcher["containers"][0]["env"])
    assert secret not in json.dumps(fetcher["containers"][0]["args"])
    assert "secretKeyRef" not in json.dumps(server) and "initContainers" not in server
    (volume,) = [volume for volume in server["volumes"] if volume["name"] == "model"]
    (mount,) = [one for one in server["containers"][0]["volumeMounts"] if one["name"] == "model"]
    assert volume["persistentVolumeClaim"]["readOnly"] is mount["readOnly"] is True
    (target,) = [v for v in fetcher["volumes"] if v["name"] == "model"]
    claim = volume["persistentVolumeClaim"]["claimName"]
    assert target["persistentVolumeClaim"] == {"claimName": claim}
    arguments = fetcher["containers"][0]["args"]
    assert arguments[arguments.index("--to") + 1] == server["containers"][0]["args"][1]


def test_the_names_of_claim_and_job_change_with_the_model_only() -> None:
    def names_of(**patch: Any) -> tuple[str, str]:
        built = children(SHARED, **patch)
        return built["PersistentVolumeClaim"]["metadata"]["name"], built["Job"]["metadata"]["name"]

    same = names_of(
        cache={"download": {"timeoutSeconds": 60}, "size": "40Gi"},
        engine={"maxModelLen": 1024},
        model={"source": {"huggingFace": {"tokenSecretRef": {"name": "new"}}}},
    )
    other = names_of(model={"source": {"huggingFace": {"revision": "v2"}}})
    elsewhere = names_of(model={"source": {"huggingFace": {"endpoint": "https://other.example.com"}}})
    assert same == names_of()
    assert len({names_of(), other, elsewhere}) == 3


def test_deployments_that_share_an_existing_claim_share_the_model_path() -> None:
    twin = specs.merged(EXISTING, {"metadata": {"name": "twin"}})
    paths = [template(children(body)["Deployment"])["containers"][0]["args"][1] for body in (EXISTING, twin)]
    assert paths[0] == paths[1]
    assert "PersistentVolumeClaim" not in children(EXISTING)


def test_a_retained_claim_has_no_owner_reference() -> None:
    owned = {"metadata": {"uid": "u"}}
    for policy, is_owned in (("Retain", False), ("Delete", True)):
        body = specs.merged(specs.merged(SHARED, owned), {"spec": {"cache": {"retainPolicy": policy}}})
        claim = children(body)["PersistentVolumeClaim"]
        assert ("ownerReferences" in claim["metadata"]) is is_owned


def test_serving_pods_have_egress_to_dns_only_and_the_job_also_to_its_source() -> None:
    built = children(SHARED)
    (dns,) = built["NetworkPolicy"]["spec"]["egress"]
    assert {entry["port"] for entry in dns["ports"]} == {53}
    ports = built["Job policy"]["spec"]["egress"][-1]["ports"]
    assert [entry["port"] for entry in ports] == [443, 3128, 8443]
    chosen = built["Job policy"]["spec"]["podSelector"]["matchLabels"].items()
    assert chosen <= built["Job"]["spec"]["template"]["metadata"]["labels"].items()
    serving = built["Service"]["spec"]["selector"].items()
    assert not serving <= built["Job"]["spec"]["template"]["metadata"]["labels"].items()


def test_the_job_has_the_pods_node_selector_and_pod_affinity_for_a_single_node_claim() -> None:
    job = template(children(EXISTING)["Job"])
    assert job["nodeSelector"] == {"disktype": "ssd"}
    assert "podAffinity" in job["affinity"]
    assert "affinity" not in template(children(SHARED)["Job"])


def test_a_single_node_claim_is_rolled_out_in_place() -> None:
    numbers = children(EXISTING)["Deployment"]["spec"]["strategy"]["rollingUpdate"]
    assert numbers == {"maxSurge": 0, "maxUnavailable": 1}


def test_a_revision_of_a_shared_model_round_trips_through_its_stored_data() -> None:
    for body in (SHARED, EXISTING):
        model = spec.parse(specs.merged(body, {"metadata": {"uid": "u"}}))
        kept = resources.render_revision(model, body["spec"], resources.build(model, SETTINGS))
        assert resources.parse_stored(model, kept.name, kept.data) == kept
        assert {"Job", "Deployment"} <= {child["kind"] for child in kept.children}


def test_image_pull_secrets_of_the_operator_are_set_on_the_servers_and_the_download_job() -> None:
    settings = dataclasses.replace(SETTINGS, engine_image_pull_secrets=("a", "b"))
    built = resources.build(spec.parse(SHARED), settings)
    pods = [template(child) for child in built if child["kind"] in ("Deployment", "Job")]
    assert [pod["imagePullSecrets"] for pod in pods] == [[{"name": "a"}, {"name": "b"}]] * 2
    without = resources.build(spec.parse(SHARED), SETTINGS)
    assert "imagePullSecrets" not in json.dumps(without)
