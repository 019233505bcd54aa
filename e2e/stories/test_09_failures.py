"""Story: each failure is in the status with its reason and remedy, and in exactly one Event."""

from __future__ import annotations

import filecmp
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.kubectl import Kubectl, Manifest
from e2e.stories.deployment import SERVED_NAME, LLMDeployment, small_spec
from e2e.stories.waiting import eventually
from e2e.up.place import Place
from e2e.up.volume import Volumes


def engine_spec(**fields: object) -> Manifest:
    return {**small_spec()["engine"], **fields}


def engine_with_fault(text: str) -> Manifest:
    return engine_spec(env=[{"name": "QUIRE_FAULT", "value": text}])


def pvc_model(claim: str, path: str = "") -> Manifest:
    return {
        "source": {"pvc": {"claimName": claim, **({"path": path} if path else {})}},
        "servedName": SERVED_NAME,
    }


# Enough for a server that never loads the model, so that all fit on the node at once.
UNLOADED = {"cpu": "100m", "memory": "1Gi"}
# By the reason that each gets without anything else being done.
FAILURES: dict[str, Manifest] = {
    "ModelNotFound": {"model": pvc_model("smollm2", "no/such/model"), "resources": UNLOADED},
    "ConfigError": {"engine": engine_spec(extraArgs=["--log-level=loud"]), "resources": UNLOADED},
    "OOMKilled": {"resources": {"cpu": "100m", "memory": "400Mi"}},
    "EngineCrashed": {"engine": engine_with_fault("crash_on_load"), "resources": UNLOADED},
    "StartupTimeout": {
        "engine": engine_with_fault("slow_load:after=6"),
        "health": {"startupTimeoutSeconds": 20, "loadStallTimeoutSeconds": 15},
    },
}
FAULTS = {"EngineCrashed": "crash_on_load", "StartupTimeout": "slow_load"}
WAITING: dict[str, Manifest] = {
    "nowhere": {"scheduling": {"nodeSelector": {"disk": "of-gold"}}},
    "unclaimed": {"model": pvc_model("later")},
    "keyless": {"security": {"apiKeysSecretRef": {"name": "forgotten"}}, "resources": UNLOADED},
}


@pytest.fixture(scope="module")
def failing(kube: Kubectl, namespace: str) -> dict[str, LLMDeployment]:
    """The LLMDeployments of FAILURES and WAITING, all applied at once, since most of them only take time.

    A test removes the one that it looked at.
    """
    specs = {**{reason.lower(): changes for reason, changes in FAILURES.items()}, **WAITING}
    made = {name: LLMDeployment(kube, namespace, name) for name in specs}
    for name, changes in specs.items():
        made[name].apply(small_spec(**changes))
    return made


# StartupTimeout takes longest.
@pytest.mark.parametrize(
    "reason",
    [
        pytest.param(reason, marks=pytest.mark.deep if reason == "StartupTimeout" else [])
        for reason in FAILURES
    ],
)
def test_a_pod_that_ends_with_a_reason_has_it_in_the_status_and_one_event(
    reason: str, failing: dict[str, LLMDeployment]
) -> None:
    llm = failing[reason.lower()]
    if reason in FAULTS:
        llm.wait_fault(FAULTS[reason])
    if reason == "OOMKilled":
        eventually("the kubelet says so", lambda: "OOMKilled" in ended(llm))

    failure = llm.wait_failure(reason)

    assert failure["exitCode"] != 0
    assert len(failure["message"]) > 20, "the message does not say what to do"
    assert llm.condition("Ready")["status"] == "False"
    eventually("an Event reports it", lambda: llm.events(reason))
    assert len(llm.events(reason)) == 1
    llm.remove()


def ended(llm: LLMDeployment) -> set[str]:
    """The reasons for which its containers ended, as the kubelet reports them."""
    states = [
        container.get(which, {}).get("terminated", {})
        for pod in llm.pods()
        for container in pod["status"].get("containerStatuses", ())
        for which in ("state", "lastState")
    ]
    return {str(state["reason"]) for state in states if "reason" in state}


def test_a_node_selector_that_no_node_meets_is_waiting_for_node(
    kube: Kubectl, failing: dict[str, LLMDeployment]
) -> None:
    nodes = kube.list("nodes", "")
    assert nodes and all(node["metadata"]["labels"].get("disk") != "of-gold" for node in nodes)
    ready = failing["nowhere"].wait_reason("Ready", "WaitingForNode")

    assert "node" in ready["message"]
    failing["nowhere"].remove()


def test_a_missing_claim_is_volume_pending_until_the_claim_appears(
    kube: Kubectl, place: Place, volumes: Volumes, namespace: str, failing: dict[str, LLMDeployment]
) -> None:
    llm = failing["unclaimed"]
    assert kube.get("persistentvolumeclaims", "later", namespace) is None
    ready = llm.wait_reason("Ready", "VolumePending")
    assert "later" in ready["message"]

    volumes.provide(place.model, namespace, "later")
    llm.wait_ready()
    volumes.remove(namespace, "later")
    llm.remove()


def test_a_missing_secret_is_volume_pending_and_named(
    kube: Kubectl, namespace: str, failing: dict[str, LLMDeployment]
) -> None:
    assert not kube.run("get", "secret", "forgotten", "-n", namespace, "--ignore-not-found")
    ready = failing["keyless"].wait_reason("Ready", "VolumePending")

    assert "forgotten" in ready["message"]
    failing["keyless"].remove()


def test_a_flipped_bit_in_the_weights_is_found_before_the_pod_serves(
    place: Place, volumes: Volumes, namespace: str, deploy: Callable[..., LLMDeployment], tmp_path: Path
) -> None:
    corrupt = tmp_path / "corrupt"
    shutil.copytree(place.model, corrupt)
    weights = next(corrupt.glob("*.safetensors"))
    flip_a_bit(weights)
    assert not filecmp.cmp(weights, place.model / weights.name, shallow=False), "the bit was not flipped"
    volumes.provide(corrupt, namespace, "corrupt")
    shutil.rmtree(corrupt)
    try:
        llm = deploy("corrupt", model=pvc_model("corrupt"))
        failure = llm.wait_failure("ModelCorrupt")
        assert "safetensors" in failure["message"]
    finally:
        volumes.remove(namespace, "corrupt")


def flip_a_bit(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1000, 2)
        byte = file.read(1)
        file.seek(-1000, 2)
        file.write(bytes([byte[0] ^ 0x10]))


@pytest.mark.deep
def test_a_foreign_service_of_the_same_name_is_not_changed_and_named(
    kube: Kubectl, namespace: str, deploy: Callable[..., LLMDeployment]
) -> None:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "taken", "namespace": namespace},
        "spec": {"selector": {"app": "theirs"}, "ports": [{"port": 80}]},
    }
    kube.apply(service)

    llm = deploy("taken")
    stalled = llm.wait_reason("Stalled", "OwnershipConflict")

    theirs = kube.get("services", "taken", namespace)
    assert "Service" in stalled["message"] and "taken" in stalled["message"]
    assert theirs is not None and theirs["spec"]["selector"] == {"app": "theirs"}
    kube.delete("service", "taken", namespace)
    llm.wait_ready()


@pytest.mark.deep
def test_an_exceeded_quota_is_named_until_it_is_removed(
    kube: Kubectl, namespace: str, deploy: Callable[..., LLMDeployment]
) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "none-left", "namespace": namespace},
        "spec": {"hard": {"pods": "0"}},
    }
    kube.apply(quota)
    eventually(
        "the quota is enforced",
        lambda: (kube.get("resourcequotas", "none-left", namespace) or {}).get("status"),
    )

    llm = deploy("quota")
    ready = llm.wait_reason("Ready", "QuotaExceeded")
    assert "none-left" in ready["message"]

    kube.delete("resourcequota", "none-left", namespace)
    llm.wait_ready()
