"""A model that is downloaded once for all pods: its claim, its Job, and what the pods mount."""

from __future__ import annotations

import json
from typing import Any

import pytest

from e2e.api import specs
from quire_operator import resources, spec
from quire_operator.settings import Settings

SETTINGS = Settings(engine_image="registry.example/quire-server:1")
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
def test_only_the_job_has_the_credentials_and_only_it_may_write(body: specs.Body, secret: str) -> None:
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


def test_another_model_has_another_claim_and_the_same_one_keeps_its() -> None:
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


def test_who_shares_a_claim_shares_the_model_in_it() -> None:
    twin = specs.merged(EXISTING, {"metadata": {"name": "twin"}})
    paths = [template(children(body)["Deployment"])["containers"][0]["args"][1] for body in (EXISTING, twin)]
    assert paths[0] == paths[1]
    assert "PersistentVolumeClaim" not in children(EXISTING)


def test_a_claim_that_is_to_be_retained_belongs_to_no_one() -> None:
    owned = {"metadata": {"uid": "u"}}
    for policy, is_owned in (("Retain", False), ("Delete", True)):
        body = specs.merged(specs.merged(SHARED, owned), {"spec": {"cache": {"retainPolicy": policy}}})
        claim = children(body)["PersistentVolumeClaim"]
        assert ("ownerReferences" in claim["metadata"]) is is_owned


def test_pods_of_a_shared_model_have_no_way_out_and_the_job_only_that_to_its_source() -> None:
    built = children(SHARED)
    (dns,) = built["NetworkPolicy"]["spec"]["egress"]
    assert {entry["port"] for entry in dns["ports"]} == {53}
    ports = built["Job policy"]["spec"]["egress"][-1]["ports"]
    assert [entry["port"] for entry in ports] == [443, 3128, 8443]
    chosen = built["Job policy"]["spec"]["podSelector"]["matchLabels"].items()
    assert chosen <= built["Job"]["spec"]["template"]["metadata"]["labels"].items()
    serving = built["Service"]["spec"]["selector"].items()
    assert not serving <= built["Job"]["spec"]["template"]["metadata"]["labels"].items()


def test_the_job_runs_where_its_pods_may_and_beside_them_where_one_node_mounts_the_claim() -> None:
    job = template(children(EXISTING)["Job"])
    assert job["nodeSelector"] == {"disktype": "ssd"}
    assert "podAffinity" in job["affinity"]
    assert "affinity" not in template(children(SHARED)["Job"])


def test_a_claim_of_one_node_is_handed_over_in_place() -> None:
    numbers = children(EXISTING)["Deployment"]["spec"]["strategy"]["rollingUpdate"]
    assert numbers == {"maxSurge": 0, "maxUnavailable": 1}


def test_what_a_revision_keeps_can_be_read_again() -> None:
    for body in (SHARED, EXISTING):
        model = spec.parse(specs.merged(body, {"metadata": {"uid": "u"}}))
        kept = resources.render_revision(model, body["spec"], resources.build(model, SETTINGS))
        assert resources.parse_stored(model, kept.name, kept.data) == kept
        assert {"Job", "Deployment"} <= {child["kind"] for child in kept.children}


def test_the_administrators_pull_secrets_are_on_the_servers_and_on_the_download() -> None:
    settings = Settings(engine_image="registry.example/quire-server:1", engine_image_pull_secrets=("a", "b"))
    built = resources.build(spec.parse(SHARED), settings)
    pods = [template(child) for child in built if child["kind"] in ("Deployment", "Job")]
    assert [pod["imagePullSecrets"] for pod in pods] == [[{"name": "a"}, {"name": "b"}]] * 2
    without = resources.build(spec.parse(SHARED), SETTINGS)
    assert "imagePullSecrets" not in json.dumps(without)
