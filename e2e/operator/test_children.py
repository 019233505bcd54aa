"""An LLMDeployment gets its children; what is deleted or edited by hand is restored within two seconds."""

from __future__ import annotations

import time
from typing import Any

import pytest

from e2e.operator.process import OperatorProcess
from e2e.operator.world import BUDGET, CHILDREN, PATHS, World
from e2e.waiting import eventually

BUSY_SECONDS = 3.0  # beyond the two: room for a machine on which other tests run

pytestmark = [pytest.mark.api, pytest.mark.usefixtures("operator")]

EDITS: dict[str, dict[str, Any]] = {
    "Deployment": {"spec": {"progressDeadlineSeconds": 33, "replicas": 7}},
    "Service": {"spec": {"selector": {"serving.quire.dev/name": "another"}}},
    "ServiceAccount": {"automountServiceAccountToken": True},
    "PodDisruptionBudget": {"spec": {"maxUnavailable": 0}},
    "NetworkPolicy": {"spec": {"ingress": []}},
    "ConfigMap": {"metadata": {"ownerReferences": None, "labels": {"serving.quire.dev/name": None}}},
}


def deployed(world: World, namespace: str) -> None:
    """Waits for the children of "m", makes its first pod, and waits for what follows that."""
    eventually("all children", lambda: world.has_children(namespace, "m"))
    world.make_first_pod(namespace, "m")


def test_the_pod_disruption_budget_is_created_with_the_first_pod(world: World, namespace: str) -> None:
    """Else Kubernetes records an Event, NoPods, for each new LLMDeployment."""
    world.deploy(namespace, "m")
    world.wait_condition(namespace, "m", "Reconciling", "True")
    eventually("all other children", lambda: world.has_children(namespace, "m"))
    assert world.child(BUDGET, namespace, "m") is None

    deployed(world, namespace)
    assert world.child(BUDGET, namespace, "m") is not None


def test_children_get_an_owner_reference_and_the_users_object_gets_only_its_status(
    world: World, namespace: str
) -> None:
    body = world.deploy(
        namespace, "m", engine={"env": [{"name": "OTEL_SERVICE_NAME", "value": 'hé \U0001f600 $(id) "\n\t}'}]}
    )

    deployed(world, namespace)

    for kind in (*CHILDREN, BUDGET):
        child = world.child(kind, namespace, "m")
        assert child is not None
        (owner,) = child["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == (body["metadata"]["uid"], True)
        (apply,) = [m for m in child["metadata"]["managedFields"] if m["operation"] == "Apply"]
        assert apply["manager"] == "quire-operator"
    world.wait_condition(namespace, "m", "Reconciling", "True")
    after = world.read("LLMDeployment", namespace, "m")
    assert after["spec"] == body["spec"]
    assert "finalizers" not in after["metadata"] and "annotations" not in after["metadata"]
    assert after["status"]["observedGeneration"] == after["metadata"]["generation"]
    (container,) = world.read("Deployment", namespace, "m")["spec"]["template"]["spec"]["containers"]
    assert container["env"][0]["value"] == 'hé \U0001f600 $$(id) "\n\t}'  # literal to the kubelet


@pytest.mark.chaos(9, fault="a child deleted by hand, of each kind", proof="another uid")
@pytest.mark.parametrize("kind", (*CHILDREN, BUDGET))
def test_a_deleted_child_is_recreated_within_two_seconds(world: World, namespace: str, kind: str) -> None:
    world.deploy(namespace, "m")
    deployed(world, namespace)
    before = world.child(kind, namespace, "m")
    assert before is not None

    world.delete(kind, namespace, before["metadata"]["name"])
    start = time.monotonic()
    eventually(
        f"another {kind}",
        lambda: (
            (now := world.child(kind, namespace, "m")) and now["metadata"]["uid"] != before["metadata"]["uid"]
        ),
    )

    assert time.monotonic() - start < 2 + BUSY_SECONDS


@pytest.mark.chaos(9, fault="a child edited by hand, of each kind", proof="the edit is accepted")
@pytest.mark.parametrize("kind", EDITS)
def test_an_edited_child_is_restored_within_two_seconds(world: World, namespace: str, kind: str) -> None:
    world.deploy(namespace, "m")
    deployed(world, namespace)
    before = world.child(kind, namespace, "m")
    assert before is not None
    name = before["metadata"]["name"]

    def is_as_before(now: dict[str, Any]) -> bool:
        fields = ("labels", "ownerReferences")
        same = all(now["metadata"].get(field) == before["metadata"].get(field) for field in fields)
        return same and all(
            now.get(key) == before.get(key) for key in ("spec", "automountServiceAccountToken")
        )

    assert not is_as_before(world.patch(kind, namespace, name, EDITS[kind])), "the edit changes something"
    start = time.monotonic()
    eventually(f"the {kind} as before", lambda: is_as_before(world.read(kind, namespace, name)))
    assert time.monotonic() - start < 2 + BUSY_SECONDS


POD = "/spec/template/spec"
SERVER = f"{POD}/containers/0"
# Edits after which our part and that of the other manager exclude each other.
REPLACEMENTS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "port of the Service": ("Service", [{"op": "replace", "path": "/spec/ports/0/port", "value": 8080}]),
    "port of the container": (
        "Deployment",
        [{"op": "replace", "path": f"{SERVER}/ports/0/containerPort", "value": 9999}],
    ),
    "name of the container": ("Deployment", [{"op": "replace", "path": f"{SERVER}/name", "value": "else"}]),
    "source of a volume": (
        "Deployment",
        [{"op": "replace", "path": f"{POD}/volumes/0", "value": {"name": "model", "emptyDir": {}}}],
    ),
    "handler of a probe": (
        "Deployment",
        [
            {"op": "remove", "path": f"{SERVER}/readinessProbe/httpGet"},
            {"op": "add", "path": f"{SERVER}/readinessProbe/exec", "value": {"command": ["true"]}},
        ],
    ),
    "source of a variable": (
        "Deployment",
        [
            {"op": "remove", "path": f"{SERVER}/env/0/value"},
            {
                "op": "add",
                "path": f"{SERVER}/env/0/valueFrom",
                "value": {"fieldRef": {"fieldPath": "metadata.name"}},
            },
        ],
    ),
    "seccomp profile": (
        "Deployment",
        [
            {
                "op": "replace",
                "path": f"{POD}/securityContext/seccompProfile",
                "value": {"type": "Localhost", "localhostProfile": "else.json"},
            }
        ],
    ),
    "limit of disruptions": (
        BUDGET,
        [
            {"op": "remove", "path": "/spec/maxUnavailable"},
            {"op": "add", "path": "/spec/minAvailable", "value": 1},
        ],
    ),
    "variable of the server": (
        "Deployment",
        [
            {
                "op": "add",
                "path": f"{SERVER}/env/-",
                "value": {"name": "QUIRE_MAX_NUM_SEQS", "value": "1"},
            }
        ],
    ),
}


@pytest.mark.chaos(9, fault="a child edited so that ours and theirs exclude each other", proof="accepted")
@pytest.mark.parametrize("edit", REPLACEMENTS)
def test_what_replaced_a_part_of_a_child_is_removed_and_the_child_stays_the_same_object(
    world: World, namespace: str, edit: str
) -> None:
    kind, operations = REPLACEMENTS[edit]
    world.deploy(namespace, "m", engine={"env": [{"name": "OTEL_SERVICE_NAME", "value": "hello"}]})
    deployed(world, namespace)
    before = world.child(kind, namespace, "m")
    assert before is not None

    path = f"{PATHS[kind].format(namespace)}/m"
    patched = world.client.request("PATCH", path, operations, "application/json-patch+json")
    assert patched["spec"] != before["spec"], "the edit is accepted"
    start = time.monotonic()
    after = eventually(
        f"the {kind} as before",
        lambda: now if (now := world.read(kind, namespace, "m"))["spec"] == before["spec"] else None,
    )

    assert time.monotonic() - start < 2 + BUSY_SECONDS
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["spec"].get("clusterIP") == before["spec"].get("clusterIP")
    if kind == "Deployment":  # the edit and its repair, each one rollout
        assert after["metadata"]["generation"] == before["metadata"]["generation"] + 2
    world.wait_condition(namespace, "m", "Stalled", "False")


def test_a_changed_port_is_rolled_out_after_the_repair_of_an_edited_one(world: World, namespace: str) -> None:
    world.deploy(namespace, "m")
    deployed(world, namespace)
    edit = [{"op": "replace", "path": "/spec/ports/0/port", "value": 8080}]
    world.client.request(
        "PATCH", f"{PATHS['Service'].format(namespace)}/m", edit, "application/json-patch+json"
    )

    world.patch("LLMDeployment", namespace, "m", {"spec": {"networking": {"service": {"port": 8443}}}})

    def ports() -> list[int]:
        return [port["port"] for port in world.read("Service", namespace, "m")["spec"]["ports"]]

    eventually("the new port alone", lambda: ports() == [8443])


def test_a_sidecar_and_variables_of_other_managers_survive_a_repair(world: World, namespace: str) -> None:
    world.deploy(namespace, "m")
    deployed(world, namespace)
    sidecar = {"name": "proxy", "image": "proxy:1"}
    added = [
        {"op": "add", "path": f"{POD}/containers/-", "value": sidecar},
        {"op": "add", "path": f"{SERVER}/env", "value": [{"name": "HTTP_PROXY", "value": "http://proxy"}]},
        {"op": "replace", "path": f"{SERVER}/ports/0/containerPort", "value": 9999},
    ]
    path = f"{PATHS['Deployment'].format(namespace)}/m"
    world.client.request("PATCH", path, added, "application/json-patch+json")

    def pod_spec() -> dict[str, Any]:
        spec: dict[str, Any] = world.read("Deployment", namespace, "m")["spec"]["template"]["spec"]
        return spec

    def has_our_port() -> bool:
        return [port["containerPort"] for port in pod_spec()["containers"][0]["ports"]] == [8000, 8001]

    eventually("our port", has_our_port)
    assert [container["name"] for container in pod_spec()["containers"]] == ["server", "proxy"]
    assert pod_spec()["containers"][0]["env"] == [{"name": "HTTP_PROXY", "value": "http://proxy"}]


def test_fields_added_by_other_managers_are_left_alone(world: World, namespace: str) -> None:
    world.deploy(namespace, "m")
    eventually("all children", lambda: world.has_children(namespace, "m"))

    world.patch("Service", namespace, "m", {"metadata": {"labels": {"team": "a"}}})
    world.patch("Service", namespace, "m", {"spec": {"selector": {"serving.quire.dev/name": "else"}}})
    eventually(
        "the selector is mended",
        lambda: world.read("Service", namespace, "m")["spec"]["selector"]["serving.quire.dev/name"] == "m",
    )

    assert world.read("Service", namespace, "m")["metadata"]["labels"]["team"] == "a"


def test_an_old_config_map_is_deleted_once_no_replica_set_or_pod_refers_to_it(
    world: World, namespace: str
) -> None:
    world.deploy(namespace, "m", engine={"maxModelLen": 1024})
    eventually("all children", lambda: world.has_children(namespace, "m"))
    (old,) = world.find("ConfigMap", namespace)
    world.make_pod(namespace, "m", {"phase": "Pending"})

    world.patch("LLMDeployment", namespace, "m", {"spec": {"engine": {"maxModelLen": 2048}}})
    eventually("two ConfigMaps", lambda: len(world.find("ConfigMap", namespace)) == 2)
    world.wait_condition(namespace, "m", "Reconciling", "True")
    assert world.get("ConfigMap", namespace, old["metadata"]["name"]) is not None

    for kind in ("ReplicaSet", "Pod"):
        for body in world.find(kind, namespace):
            world.delete(kind, namespace, body["metadata"]["name"])
    eventually(
        "the old ConfigMap is gone",
        lambda: world.get("ConfigMap", namespace, old["metadata"]["name"]) is None,
    )


def test_a_child_that_the_spec_no_longer_wants_is_deleted(world: World, namespace: str) -> None:
    world.deploy(namespace, "m")
    eventually("all children", lambda: world.has_children(namespace, "m"))

    world.patch(
        "LLMDeployment", namespace, "m", {"spec": {"networking": {"networkPolicy": {"mode": "None"}}}}
    )

    eventually("no NetworkPolicy", lambda: world.get("NetworkPolicy", namespace, "m") is None)


def test_repeated_edits_of_a_child_by_others_do_not_cause_a_write_storm(
    world: World, namespace: str, operator: OperatorProcess
) -> None:
    world.deploy(namespace, "m")
    eventually("all children", lambda: world.has_children(namespace, "m"))
    before = world.writes()[f"patch services {namespace}/m"]

    until = time.monotonic() + 5
    while time.monotonic() < until:
        world.patch("Service", namespace, "m", {"spec": {"selector": {"serving.quire.dev/name": "else"}}})
        time.sleep(0.1)

    assert world.writes()[f"patch services {namespace}/m"] - before <= 6
    eventually(
        "the selector is mended in the end",
        lambda: world.read("Service", namespace, "m")["spec"]["selector"]["serving.quire.dev/name"] == "m",
    )
    assert 'apply_conflicts_total{kind="Service"}' in operator.ask("/metrics")[1]
