"""Adapters in the pods: who has the credentials, what may be written, and what restarts no pod."""

from __future__ import annotations

import json
from typing import Any

import pytest

from e2e.api import specs
from quire_operator import names, resources, spec
from quire_operator.errors import SpecError
from quire_operator.observed import Observed, Ref
from quire_operator.resources import restricted_references
from quire_operator.settings import Settings
from tests.operator.plan.planning import plan_of

SETTINGS = Settings(engine_image="registry.example/quire-server:1", credential_hosts=("*.example.com",))
ADAPTERS = {one["name"]: one for one in specs.ADAPTED["spec"]["adapters"]}
SHARED = specs.DOWNLOADED[4]


def with_adapters(*adapters: str, base: specs.Body = specs.ADAPTED) -> specs.Body:
    patch = {"engine": {"maxAdapters": 4}, "adapters": [ADAPTERS[name] for name in adapters]}
    return specs.merged(base, {"spec": patch})


def children(body: specs.Body) -> dict[Ref, dict[str, Any]]:
    built = resources.build(spec.parse(body), SETTINGS)
    return {Ref(child["kind"], child["metadata"]["name"]): child for child in built}


def pod(body: specs.Body) -> dict[str, Any]:
    name = body["metadata"]["name"]
    template = children(body)[Ref("Deployment", name)]["spec"]["template"]["spec"]
    assert isinstance(template, dict)
    return template


def sidecar(body: specs.Body) -> dict[str, Any]:
    (found,) = [one for one in pod(body)["initContainers"] if one["name"] == names.ADAPTERS]
    assert isinstance(found, dict)
    return found


def listed(body: specs.Body) -> list[dict[str, Any]]:
    name = names.adapters(body["metadata"]["name"])
    data = children(body)[Ref("ConfigMap", name)]["data"][names.ADAPTER_LIST_FILE]
    found = json.loads(data)["adapters"]
    assert isinstance(found, list)
    return found


def egress(body: specs.Body) -> list[list[int]]:
    policy = children(body)[Ref("NetworkPolicy", body["metadata"]["name"])]
    return [[port["port"] for port in rule["ports"]] for rule in policy["spec"]["egress"]]


@pytest.mark.parametrize("body", [specs.minimal(), specs.SHARING], ids=specs.name_of)
def test_pods_without_adapters_or_with_a_directory_of_the_user_s_have_no_sidecar(body: specs.Body) -> None:
    assert "initContainers" not in pod(body)
    assert Ref("ConfigMap", names.adapters(body["metadata"]["name"])) not in children(body)


def test_each_pod_of_a_group_downloads_the_adapters_for_itself() -> None:
    body = with_adapters("support", base=specs.GROUPED)
    built = children(body)[Ref(names.GROUP_KIND, body["metadata"]["name"])]
    templates = built["spec"]["leaderWorkerTemplate"]
    pods = [templates[role]["spec"] for role in ("leaderTemplate", "workerTemplate")]
    for one in pods:
        (found,) = [each for each in one["initContainers"] if each["name"] == names.ADAPTERS]
        written = {mount["mountPath"] for mount in found["volumeMounts"]}
        server = one["containers"][0]
        read = {mount["mountPath"] for mount in server["volumeMounts"] if mount["name"] == "adapters"}
        assert read and read <= written
        assert {"name": "adapter-list", "configMap": {"name": names.adapters("grouped")}} in one["volumes"]


def test_the_first_adapter_and_further_ones_with_the_same_secrets_change_no_pod() -> None:
    none, public = with_adapters(), with_adapters("public")
    assert pod(public) == pod(none)
    assert listed(none) == []
    one, two = with_adapters("support"), with_adapters("support")
    two["spec"]["adapters"].append({**ADAPTERS["support"], "name": "other"})
    assert pod(two) == pod(one) != pod(none)
    assert [entry["name"] for entry in listed(two)] == ["support", "other"]


def test_the_order_of_adapters_changes_no_pod() -> None:
    forwards = with_adapters(*ADAPTERS)
    assert pod(with_adapters(*reversed(ADAPTERS))) == pod(forwards)


def test_only_the_sidecar_mounts_the_credentials_of_adapters_and_may_write_them() -> None:
    built = pod(specs.ADAPTED)
    secrets = {volume["name"]: volume["secret"] for volume in built["volumes"] if "secret" in volume}
    (server,) = built["containers"]
    served = {mount["name"]: mount for mount in server["volumeMounts"]}
    assert {one["secretName"] for one in secrets.values()} == {"hub", "store", "google", "pull"}
    assert secrets.keys().isdisjoint(served)
    assert secrets.keys() <= {mount["name"] for mount in sidecar(specs.ADAPTED)["volumeMounts"]}
    assert served["adapters"] == {"name": "adapters", "mountPath": "/adapters", "readOnly": True}


def test_a_secret_is_mounted_once_with_the_entries_that_are_named_and_may_be_missing() -> None:
    body = with_adapters("support")
    source = {"huggingFace": {"repo": "example/b", "tokenSecretRef": {"name": "hub", "key": "other"}}}
    body["spec"]["adapters"].append({"name": "b", "source": source})
    (secret,) = [volume["secret"] for volume in pod(body)["volumes"] if "secret" in volume]
    assert [item["key"] for item in secret["items"]] == ["other", "token"]
    assert secret["optional"] is True


def test_claims_are_mounted_read_only_and_once() -> None:
    mounts = [mount for mount in sidecar(specs.ADAPTED)["volumeMounts"] if "claim" in mount["name"]]
    assert [(one["mountPath"], one["readOnly"]) for one in mounts] == [("/adapter-claims/adapters", True)]
    assert {"name": "local", "path": "/adapter-claims/adapters/teams/local"} in listed(specs.ADAPTED)


def test_every_file_that_the_list_names_is_mounted_in_the_sidecar() -> None:
    built = pod(specs.ADAPTED)
    paths = {mount["name"]: mount["mountPath"] for mount in sidecar(specs.ADAPTED)["volumeMounts"]}
    files = {
        f"{paths[volume['name']]}/{item['path']}"
        for volume in built["volumes"]
        for item in volume.get("secret", {}).get("items", ())
    }
    entries = listed(specs.ADAPTED)
    named = {path for entry in entries for path in entry.get("files", {}).values()}
    (key,) = {entry["environment"].get("GOOGLE_APPLICATION_CREDENTIALS") for entry in entries[2:3]}
    (docker,) = {entry["environment"].get("DOCKER_CONFIG") for entry in entries[4:5]}
    assert named | {key, f"{docker}/config.json"} == files


def test_adapters_are_downloaded_through_the_proxy_and_with_the_authorities_of_the_model() -> None:
    body = with_adapters("support", base=SHARED)
    (entry,) = listed(body)
    assert entry["environment"]["HTTPS_PROXY"] == "http://proxy.example.com:3128"
    assert entry["environment"]["SSL_CERT_FILE"] == "/etc/quire/ca/ca.crt"
    assert "/etc/quire/ca" in {mount["mountPath"] for mount in sidecar(body)["volumeMounts"]}


def test_variables_that_the_administrator_allows_reach_the_downloads_of_adapters() -> None:
    base = specs.merged(
        SHARED, {"spec": {"cache": {"download": {"env": [{"name": "GIT_TRACE", "value": "1"}]}}}}
    )
    allowing = Settings(engine_image="e", credential_hosts=("*",), allowed_env=("GIT_TRACE",))
    built = resources.build(spec.parse(with_adapters("support", base=base)), allowing)
    (workload,) = [child for child in built if child["kind"] == "Deployment"]
    (container,) = workload["spec"]["template"]["spec"]["initContainers"]
    assert "--allow-env=GIT_TRACE" in container["args"]
    assert not [argument for argument in sidecar(with_adapters("support"))["args"] if "env" in argument]


def test_pods_connect_to_the_sources_of_their_adapters_and_without_these_to_none() -> None:
    assert egress(with_adapters()) == egress(with_adapters("local")) == [[53, 53]]
    assert egress(with_adapters("support")) == [[53, 53], [443, 8443]]
    assert egress(with_adapters(base=SHARED)) == [[53, 53]]
    assert egress(with_adapters("support", base=SHARED)) == [[53, 53], [443, 3128, 8443]]


@pytest.mark.parametrize(("name", "kind"), [("support", "huggingFace"), ("sales.v2", "s3")])
def test_credentials_of_adapters_go_to_trusted_hosts_only(name: str, kind: str) -> None:
    untrusting = Settings(engine_image="e")
    with pytest.raises(SpecError, match=rf"spec.adapters\[0\].source.{kind}.endpoint"):
        resources.build(spec.parse(with_adapters(name)), untrusting)
    resources.build(spec.parse(with_adapters("public")), untrusting)


def test_a_proxy_that_is_not_trusted_gets_no_credentials_of_adapters() -> None:
    base = specs.merged(SHARED, {"spec": {"model": {"source": {"huggingFace": {"tokenSecretRef": None}}}}})
    hub = {"repo": "example/a", "tokenSecretRef": {"name": "hub", "key": "token"}}
    body = with_adapters(base=base)
    resources.build(spec.parse(body), Settings(engine_image="e"))
    body["spec"]["adapters"] = [{"name": "a", "source": {"huggingFace": hub}}]
    with pytest.raises(SpecError, match=r"cache.download.env\[0\]"):
        resources.build(spec.parse(body), Settings(engine_image="e"))


def test_secrets_of_adapters_need_the_label_where_all_secrets_do() -> None:
    labelled = Settings(engine_image="e", secret_references="Labelled")
    found = restricted_references(spec.parse(with_adapters("public", "support")), labelled)
    assert [(one.name, one.field) for one in found] == [
        ("hub", "spec.adapters[1].source.huggingFace.tokenSecretRef.name")
    ]


def test_pods_that_use_an_identity_carry_its_label_before_the_first_adapter() -> None:
    body = specs.merged(with_adapters(), {"spec": {"security": {"identity": {"workload": "AKS"}}}})
    template = children(body)[Ref("Deployment", "adapted")]["spec"]["template"]
    assert template["metadata"]["labels"].items() >= names.AKS_IDENTITY.items()


def test_an_operator_that_renders_pods_otherwise_replaces_none_for_another_adapter() -> None:
    before, after = with_adapters("public"), with_adapters("public", "public")
    after["spec"]["adapters"][1] = {**ADAPTERS["public"], "name": "second"}
    model = spec.parse(before)
    stored = resources.render_revision(model, before["spec"], resources.build(model, SETTINGS))
    newer = Settings(engine_image="registry.example/quire-server:2")

    assert resources.renders_same_pods(spec.parse(after), after, stored)
    applied = resources.with_revision(resources.build(spec.parse(after), newer), stored)
    (workload,) = [child for child in applied if child["kind"] == "Deployment"]
    (names_of_list,) = [child for child in applied if child["metadata"]["name"] == "adapted-adapters"]
    assert workload["spec"]["template"]["spec"]["containers"][0]["image"].endswith(":1")
    assert "second" in names_of_list["data"][names.ADAPTER_LIST_FILE]


@pytest.mark.parametrize("name", ["support", "local"])
def test_an_adapter_that_needs_another_volume_or_port_needs_other_pods(name: str) -> None:
    before, after = with_adapters("public"), with_adapters("public", name)
    model = spec.parse(before)
    stored = resources.render_revision(model, before["spec"], resources.build(model, SETTINGS))
    assert not resources.renders_same_pods(spec.parse(after), after, stored)


def _applied(body: specs.Body) -> Observed:
    """Everything of it as it was applied, with one pod."""
    live = specs.merged(body, {"metadata": {"uid": "u1", "generation": 1}})
    plan = plan_of(resources.build(spec.parse(live), SETTINGS), Observed(body=live))
    stored = {Ref(one["kind"], one["metadata"]["name"]): one for one in plan.apply}
    for one in stored.values():
        one["metadata"] |= {"uid": f"uid-{one['kind']}"}
    template = stored[Ref("Deployment", "adapted")]["spec"]["template"]
    running = {"metadata": {"name": "p", "uid": "p", "namespace": "default"}, "spec": template["spec"]}
    return Observed(body=live, children=stored, pods=(running,))


def test_another_adapter_is_one_write_of_the_list() -> None:
    observed = _applied(with_adapters("public"))
    changed = specs.merged(observed.body, {"spec": {"adapters": [{**ADAPTERS["public"], "name": "renamed"}]}})
    plan = plan_of(resources.build(spec.parse(changed), SETTINGS), observed)
    written = [one["metadata"]["name"] for one in plan.apply if one["kind"] != "PodDisruptionBudget"]
    assert written == ["adapted-adapters"]
    assert plan.delete == ()


def test_the_list_stays_while_a_pod_mounts_it() -> None:
    observed = _applied(with_adapters("public"))
    without = specs.merged(observed.body, {"spec": {"adapters": None, "engine": {"maxAdapters": None}}})
    without["spec"]["engine"] = {}
    desired = resources.build(spec.parse(without), SETTINGS)
    target = Ref("ConfigMap", "adapted-adapters")
    assert target not in [ref for ref, _ in plan_of(desired, observed).delete]
    gone = Observed(body=observed.body, children=observed.children)
    assert target in [ref for ref, _ in plan_of(desired, gone).delete]
