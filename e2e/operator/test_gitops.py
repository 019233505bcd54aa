"""GitOps tools find no drift: the operator does not change the user's object, and re-applying it restarts no
pod.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e import yaml_files
from e2e.cluster.apiserver import ApiServer
from e2e.kubectl import Kubectl, KubectlError
from e2e.operator.process import ROOT
from e2e.operator.world import BUDGET, CHILDREN, World
from e2e.waiting import eventually

pytestmark = [pytest.mark.api, pytest.mark.timeout(120)]

NAME = "m"
KINDS = (*CHILDREN, BUDGET, "HorizontalPodAutoscaler", "ControllerRevision")
# The label by which Argo CD tracks and prunes the objects of an application.
TRACKED = {"app.kubernetes.io/instance": "my-app"}
TRACKING = {"argocd.argoproj.io/tracking-id": "my-app:serving.quire.dev/LLMDeployment:ns/m"}


@pytest.fixture
def kube(server: ApiServer) -> Kubectl:
    return Kubectl(server.bin_dir, server.kubeconfig)


@pytest.fixture
def manifest(namespace: str, tmp_path: Path) -> Path:
    """A manifest as in a repository: with nearly every field, and with an autoscaler."""
    body = yaml_files.load((ROOT / "e2e" / "api" / "full.yaml").read_text(encoding="utf-8"))
    body["metadata"] = {"name": NAME, "namespace": namespace, "labels": TRACKED, "annotations": TRACKING}
    del body["spec"]["replicas"], body["spec"]["rollout"]["paused"]
    del body["spec"]["security"]["serviceAccountName"]
    body["spec"]["autoscaling"] = {"minReplicas": 2, "maxReplicas": 8}
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump(body), encoding="utf-8")
    return path


@pytest.mark.deep
@pytest.mark.usefixtures("operator")
def test_reapplying_the_same_manifest_while_an_autoscaler_scales_changes_nothing(
    world: World, namespace: str, kube: Kubectl, manifest: Path
) -> None:
    kube.run("apply", "-f", str(manifest))
    eventually("all children", lambda: world.has_children(namespace, NAME))
    by_another = ("apply", "--server-side", "--field-manager=argocd-controller", "-f", str(manifest))
    kube.run(*by_another)  # without --force-conflicts: the operator owns no field
    settle(world, namespace, 2)
    before, writes = children(world, namespace), world.writes()
    own = owned(world, namespace)

    for replicas in (4, 8, 2):
        world.scale(namespace, NAME, replicas)
        settle(world, namespace, replicas)
        kube.run("diff", "-f", str(manifest))
        kube.run("diff", "--server-side", "--field-manager=argocd-controller", "-f", str(manifest))
        kube.run(*by_another)
        assert owned(world, namespace) == own
        assert world.read("Deployment", namespace, NAME)["spec"]["replicas"] == replicas

    assert children(world, namespace) == before
    assert applied(world.writes() - writes, namespace) == {}
    manifest.write_text(manifest.read_text(encoding="utf-8").replace("maxNumSeqs: 32", "maxNumSeqs: 33"))
    with pytest.raises(KubectlError):
        kube.run("diff", "-f", str(manifest))


@pytest.mark.usefixtures("operator")
def test_no_child_carries_the_tracking_labels_and_annotations_of_its_owner(
    world: World, namespace: str, kube: Kubectl, manifest: Path
) -> None:
    """Argo CD would prune it."""
    kube.run("apply", "-f", str(manifest))
    eventually("all children", lambda: world.has_children(namespace, NAME))

    world.make_first_pod(namespace, NAME, priorityClassName=None, runtimeClassName=None)
    for kind in KINDS:
        metadata = world.find(kind, namespace)[0]["metadata"]
        assert TRACKED.items().isdisjoint(metadata.get("labels", {}).items()), kind
        assert TRACKING.keys().isdisjoint(metadata.get("annotations", {})), kind


def settle(world: World, namespace: str, replicas: int) -> None:
    """The Deployment has that many ready pods, and the operator has processed it."""
    world.roll_out(namespace, NAME, ready=replicas)
    eventually("the status follows", lambda: world.status(namespace, NAME).get("readyReplicas") == replicas)
    world.wait_condition(namespace, NAME, "Ready", "True")


def owned(world: World, namespace: str) -> dict[str, Any]:
    """The LLMDeployment without its status, with its managed fields."""
    body = world.read("LLMDeployment", namespace, NAME)
    metadata = {key: value for key, value in body["metadata"].items() if key != "resourceVersion"}
    metadata["managedFields"] = [m for m in metadata["managedFields"] if m.get("subresource") != "status"]
    return {"metadata": metadata, "spec": body["spec"]}


def children(world: World, namespace: str) -> dict[str, Any]:
    """What must stay unchanged: resource versions, except of the Deployment, whose number of replicas
    changes.
    """
    found = {(kind, b["metadata"]["name"]): b for kind in KINDS for b in world.find(kind, namespace)}
    return {
        " ".join(key): template(body) if key[0] == "Deployment" else body["metadata"]["resourceVersion"]
        for key, body in found.items()
    }


def template(deployment: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = {**deployment["spec"]}
    del spec["replicas"]
    return spec


def applied(writes: Counter[str], namespace: str) -> dict[str, int]:
    """The writes of the operator, except for its own status and Events."""
    reported = f"patch llmdeployments/status {namespace}/{NAME}"
    return {
        what: n
        for what, n in writes.items()
        if f" {namespace}/" in what and what != reported and not what.startswith("create events ")
    }
