"""quire_operator.resources: properties of the children of every LLMDeployment."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from e2e.api import specs
from quire_operator import names, resources, spec
from quire_operator.errors import SpecError
from quire_operator.settings import Settings
from tests import kubelet
from tests.examples import examples

SETTINGS = Settings(
    engine_image="registry.example/quire-server:1",
    operator_namespace="ops",
    credential_hosts=("*.example.com",),
)
FAULTS = Settings(
    engine_image="registry.example/quire-server:1", allow_faults=True, credential_hosts=("*.example.com",)
)
UID = "11111111-2222-3333-4444-555555555555"


def build(settings: Settings = SETTINGS, **fields: Any) -> dict[str, resources.Manifest]:
    """The children of the minimal LLMDeployment with these fields, by kind."""
    children = resources.build(spec.parse(specs.minimal(**fields)), settings)
    assert len({child["kind"] for child in children}) == len(children)
    return {child["kind"]: child for child in children}


def pod_spec(**fields: Any) -> dict[str, Any]:
    result: dict[str, Any] = build(**fields)["Deployment"]["spec"]["template"]["spec"]
    return result


def container(**fields: Any) -> dict[str, Any]:
    result: dict[str, Any] = pod_spec(**fields)["containers"][0]
    return result


def hostile_texts() -> st.SearchStrategy[str]:
    shell = [
        "; id #",
        "$(touch /tmp/x)",
        "`id`",
        "a\nb: c",
        "'\"",
        "--host=0",
        "$(QUIRE_HOST)",
        "%s{0}",
        "\\",
        "- x",
    ]
    return st.sampled_from(shell) | st.text(
        st.characters(exclude_characters="\0", codec="utf-8"), max_size=30
    )


def test_the_deployment_is_last_and_its_dependencies_are_first() -> None:
    kinds = [child["kind"] for child in resources.build(spec.parse(specs.minimal()), SETTINGS)]
    assert kinds[-1] == "Deployment"
    assert set(kinds[:2]) == {"ServiceAccount", "ConfigMap"}
    assert len(kinds) == 6


@settings(max_examples=examples(100))
@given(specs.random_bodies())
def test_every_child_is_labelled_owned_and_in_the_namespace_of_its_owner(body: specs.Body) -> None:
    model = spec.parse(specs.merged(body, {"metadata": {"uid": UID, "namespace": "team-a"}}))
    for child in resources.build(model, FAULTS):
        metadata = child["metadata"]
        assert metadata["namespace"] == "team-a"
        assert names.child_labels(model.name).items() <= metadata["labels"].items()
        owners = [(o["uid"], o["controller"]) for o in metadata.get("ownerReferences", ())]
        stays = child["kind"] == "PersistentVolumeClaim" and model.spec.cache.retain_policy == "Retain"
        assert owners == ([] if stays else [(UID, True)])


@settings(max_examples=examples(100))
@given(specs.random_bodies())
def test_no_empty_value_is_rendered_except_in_selectors_and_affinities(body: specs.Body) -> None:
    for child in resources.build(spec.parse(body), FAULTS):
        for path, value in _walk(child):
            if path.rpartition(".")[2] not in (
                "podSelector",
                "namespaceSelector",
                "labelSelector",
                "nodeAffinity",
                "podAffinity",
            ):
                assert value not in (None, [], {}), path


@given(argument=hostile_texts(), value=hostile_texts(), path=st.text("ab/$()`;'\"-.é ", max_size=12))
def test_hostile_text_stays_a_single_argument_or_value(argument: str, value: str, path: str) -> None:
    fields = {
        "model": {"source": {"pvc": {"path": path}}},
        "engine": {"extraArgs": [argument], "env": [{"name": "OTEL_SERVICE_NAME", "value": f"x{value}"}]},
    }
    try:
        built = container(**fields)
    except SpecError:
        return  # refused whole is as good
    arguments, environment = kubelet.started_with(built, {"QUIRE_HOST": "0.0.0.0"})
    assert arguments == ["serve", f"/models/{path}" if path else "/models", argument]
    assert environment["OTEL_SERVICE_NAME"] == f"x{value}"
    assert "command" not in built
    assert "exec" not in json.dumps(
        {key: built[key] for key in built if key.endswith("Probe") or key == "lifecycle"}
    )


@settings(max_examples=examples(100))
@given(specs.random_bodies())
def test_every_pod_satisfies_the_restricted_pod_security_standard(body: specs.Body) -> None:
    children = resources.build(spec.parse(body), FAULTS)
    for template in specs.pod_templates(children):
        _check_restricted(template["spec"])


def _check_restricted(pod: specs.Body) -> None:
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert {key for volume in pod["volumes"] for key in volume} <= {
        "name",
        "persistentVolumeClaim",
        "configMap",
        "emptyDir",
        "ephemeral",
        "secret",
    }
    assert all("sizeLimit" in volume["emptyDir"] for volume in pod["volumes"] if "emptyDir" in volume)
    for each in (*pod["containers"], *pod.get("initContainers", [])):
        assert each["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_the_selector_never_changes_and_the_pods_match_it() -> None:
    children = build(rollout={"restartId": "x"})
    selector = {names.LABEL_NAME: "minimal", names.LABEL_ROLE: "leader"}
    assert children["Deployment"]["spec"]["selector"] == {"matchLabels": selector}
    assert children["PodDisruptionBudget"]["spec"]["selector"] == {"matchLabels": selector}
    assert children["NetworkPolicy"]["spec"]["podSelector"] == {"matchLabels": selector}
    assert children["Service"]["spec"]["selector"] == selector
    assert selector.items() <= children["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
    assert names.selector("minimal") == "serving.quire.dev/name=minimal,serving.quire.dev/role=leader"


def test_the_config_map_is_immutable_and_named_after_its_content() -> None:
    one, same, other = build(), build(replicas=2), build(engine={"maxNumSeqs": 3})
    assert one["ConfigMap"]["immutable"] is True
    assert one["ConfigMap"]["metadata"]["name"] == same["ConfigMap"]["metadata"]["name"]
    assert one["ConfigMap"]["metadata"]["name"] != other["ConfigMap"]["metadata"]["name"]
    for children in (one, other):
        reference = children["Deployment"]["spec"]["template"]["spec"]["containers"][0]["envFrom"]
        assert reference == [{"configMapRef": {"name": children["ConfigMap"]["metadata"]["name"]}}]


def test_replicas_suspension_budget_and_pausing_do_not_change_the_pod_template() -> None:
    template = build()["Deployment"]["spec"]["template"]
    for fields in (
        {"replicas": 7},
        {"suspend": True},
        {"disruption": {"maxUnavailable": 3}},
        {"rollout": {"paused": True}},
    ):
        assert build(**fields)["Deployment"]["spec"]["template"] == template


def test_a_new_restart_id_changes_only_an_annotation_of_the_pod_template() -> None:
    before, after = build(), build(rollout={"restartId": "2"})
    template = after["Deployment"]["spec"].pop("template")
    assert template["metadata"]["annotations"][names.ANNOTATION_RESTART_ID] == "2"
    assert template["spec"] == before["Deployment"]["spec"].pop("template")["spec"]
    assert before == after


def test_the_startup_probe_allows_the_whole_startup_timeout() -> None:
    built = container(health={"startupTimeoutSeconds": 601, "probes": {"startup": {"periodSeconds": 4}}})
    startup = built["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] > 601 + 4
    assert built["livenessProbe"]["terminationGracePeriodSeconds"] == 10
    assert {built[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")} == {
        "/startupz",
        "/readyz",
        "/livez",
    }


def test_the_progress_deadline_exceeds_the_startup_timeout() -> None:
    spec_of = build(health={"startupTimeoutSeconds": 600})["Deployment"]["spec"]
    assert spec_of["progressDeadlineSeconds"] == 600 + 120 + 300


def test_the_termination_grace_period_covers_pre_stop_and_drain() -> None:
    pod = pod_spec(drain={"preStopSeconds": 7, "timeoutSeconds": 60})
    assert pod["terminationGracePeriodSeconds"] == 72
    assert pod["containers"][0]["lifecycle"] == {"preStop": {"sleep": {"seconds": 7}}}
    assert "lifecycle" not in container(drain={"preStopSeconds": 0})


def test_memory_has_a_limit_and_cpu_only_a_request() -> None:
    assert container(resources={"cpu": "0.5", "memory": "1.5Gi"})["resources"] == {
        "requests": {"cpu": "500m", "memory": "1536Mi"},
        "limits": {"memory": "1536Mi"},
    }


def test_pods_are_annotated_against_eviction_while_loading_unless_disabled() -> None:
    def annotations(**fields: Any) -> dict[str, str]:
        metadata = build(**fields)["Deployment"]["spec"]["template"]["metadata"]
        result: dict[str, str] = metadata.get("annotations", {})
        return result

    assert annotations() == {
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
        "karpenter.sh/do-not-disrupt": "true",
    }
    assert annotations(disruption={"protectWhileLoading": False}) == {}


def test_the_users_service_account_replaces_ours() -> None:
    children = build(security={"serviceAccountName": "reader"})
    assert "ServiceAccount" not in children
    assert children["Deployment"]["spec"]["template"]["spec"]["serviceAccountName"] == "reader"
    assert build()["ServiceAccount"]["automountServiceAccountToken"] is False


def test_api_keys_are_mounted_from_the_referenced_secret() -> None:
    children = build(security={"apiKeysSecretRef": {"name": "keys"}})
    pod = children["Deployment"]["spec"]["template"]["spec"]
    assert {"name": "api-keys", "secret": {"secretName": "keys"}} in pod["volumes"]
    assert {"name": "api-keys", "mountPath": "/etc/quire/keys", "readOnly": True} in pod["containers"][0][
        "volumeMounts"
    ]
    assert children["ConfigMap"]["data"]["QUIRE_API_KEYS_DIR"] == "/etc/quire/keys"
    assert "QUIRE_API_KEYS_DIR" not in build()["ConfigMap"]["data"]


def test_the_key_of_a_groups_pods_is_a_file_of_its_secret_and_in_no_variable_or_argument() -> None:
    children = build(parallelism={"tensor": 2, "nodes": 2, "authSecretRef": {"name": "ranks"}})
    group = children["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    for template in (group["leaderTemplate"], group["workerTemplate"]):
        pod = template["spec"]
        (container,) = pod["containers"]
        assert {"name": "auth-key", "secret": {"secretName": "ranks"}} in pod["volumes"]
        mount = {"name": "auth-key", "mountPath": "/etc/quire/auth", "readOnly": True}
        assert mount in container["volumeMounts"]
        assert not [one for one in container["env"] if "secretKeyRef" in str(one)]
        assert "secretRef" not in str(container["envFrom"]) and "ranks" not in str(container["args"])
    assert children["ConfigMap"]["data"]["QUIRE_AUTH_KEY_DIR"] == "/etc/quire/auth"
    assert "QUIRE_AUTH_KEY_DIR" not in build()["ConfigMap"]["data"]


def test_only_the_watermark_key_is_mounted_from_its_secret() -> None:
    reference = {"name": "marks", "key": "k.v1"}
    children = build(engine={"watermark": {"mode": "OnRequest", "keySecretRef": reference}})
    pod = children["Deployment"]["spec"]["template"]["spec"]
    secret = {"secretName": "marks", "items": [{"key": "k.v1", "path": "k.v1"}]}
    assert {"name": "watermark", "secret": secret} in pod["volumes"]
    data = children["ConfigMap"]["data"]
    assert data["QUIRE_WATERMARK"] == "on-request"
    assert data["QUIRE_WATERMARK_KEY_PATH"] == "/etc/quire/watermark/k.v1"
    off = build(engine={"watermark": {"mode": "Off", "keySecretRef": reference}})["ConfigMap"]["data"]
    assert not [name for name in (off | build()["ConfigMap"]["data"]) if "WATERMARK" in name]


def test_the_network_policy_admits_clients_operator_and_monitoring_and_egress_to_dns_only() -> None:
    rules = build(networking={"networkPolicy": {"allowFrom": [{"podSelector": {}, "namespaceSelector": {}}]}})
    policy = rules["NetworkPolicy"]["spec"]
    users, watchers = policy["ingress"]
    assert users["from"] == [{"podSelector": {}}, {"namespaceSelector": {}, "podSelector": {}}]
    assert [port["port"] for port in users["ports"]] == [8000]
    assert [peer["namespaceSelector"]["matchLabels"] for peer in watchers["from"]] == [
        {"kubernetes.io/metadata.name": "ops"},
        {"kubernetes.io/metadata.name": "monitoring"},
    ]
    assert [port["port"] for port in watchers["ports"]] == [8000, 8001]
    assert [port["port"] for rule in policy["egress"] for port in rule["ports"]] == [53, 53]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert "NetworkPolicy" not in build(networking={"networkPolicy": {"mode": "None"}})


def test_fault_injection_requires_the_allow_faults_setting_of_the_operator() -> None:
    fault = {"env": [{"name": "QUIRE_FAULT", "value": "stuck_step:after=5,once"}]}
    with pytest.raises(SpecError, match="allowFaults") as error:
        build(engine=fault)
    assert error.value.field_path == "spec.engine.env[0].name"
    allowed = build(FAULTS, engine=fault)["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    assert {"name": "QUIRE_ALLOW_FAULTS", "value": "1"} in allowed["env"]


def test_allow_faults_changes_no_child_of_a_deployment_without_fault_injection() -> None:
    assert build(FAULTS) == build(SETTINGS) | {"NetworkPolicy": build(FAULTS)["NetworkPolicy"]}


def test_empty_parts_of_an_affinity_are_dropped_as_the_api_server_drops_them() -> None:
    affinity = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": []}, "nodeAffinity": None}
    assert pod_spec(scheduling={"affinity": affinity})["affinity"] == {"podAffinity": {}}


def _walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    yield path, value
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from _walk(entry, f"{path}.{key}")
    elif isinstance(value, list):
        for entry in value:
            yield from _walk(entry, path)
