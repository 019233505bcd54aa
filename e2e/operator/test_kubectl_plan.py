"""`kubectl quire plan` and `render` predict what the operator then does: each is compared with what it
did.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from e2e import yaml_files
from e2e.api import profiles
from e2e.cluster.apiserver import ApiServer
from e2e.operator.world import OPERATOR_NAMESPACE, Body, World
from e2e.waiting import eventually
from quire_operator.plan import lost_fields

pytestmark = [pytest.mark.api, pytest.mark.usefixtures("operator"), pytest.mark.timeout(180)]
BIN = Path(__file__).parents[2] / ".cluster" / "bin"
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def kubectl(server: ApiServer) -> Run:
    """kubectl with the plugin on the PATH; a manifest goes to its standard input."""
    path = f"{Path(sys.executable).parent}:{BIN}:{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "KUBECONFIG": str(server.kubeconfig)}

    def run(*arguments: str, manifest: Body | None = None) -> subprocess.CompletedProcess[str]:
        given = None if manifest is None else json.dumps(manifest)
        command = ["kubectl", *arguments, *(["-f", "-"] if manifest else [])]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ, input=given)

    return run


def manifest(namespace: str, **spec: Any) -> Body:
    least = {
        "model": {"source": {"pvc": {"claimName": "models"}}},
        "resources": {"cpu": "1", "memory": "2Gi"},
    }
    return {
        "apiVersion": "serving.quire.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "m", "namespace": namespace},
        "spec": {**least, **spec},
    }


def template(world: World, namespace: str) -> Body:
    found: Body = world.read("Deployment", namespace, "m")["spec"]["template"]
    return found


def apply(kubectl: Run, world: World, namespace: str, body: Body) -> None:
    """Make the edit, and wait until the operator has acted on it."""
    done = kubectl("apply", manifest=body)
    assert done.returncode == 0, done.stderr

    def settled() -> bool:
        stored = world.read("LLMDeployment", namespace, "m")
        return bool(
            world.has_children(namespace, "m")
            and stored.get("status", {}).get("observedGeneration") == stored["metadata"]["generation"]
        )

    eventually("the operator has seen the edit", settled)


@pytest.mark.deep
def test_the_plan_matches_what_the_operator_then_does(world: World, namespace: str, kubectl: Run) -> None:
    first = manifest(namespace, replicas=3)
    new = kubectl("quire", "plan", manifest=first)
    assert (new.returncode, "create Deployment m" in new.stdout, "start 3 pods" in new.stdout) == (
        3,
        True,
        True,
    )
    assert "create PodDisruptionBudget m, with the first pod" in new.stdout
    assert world.get("LLMDeployment", namespace, "m") is None, "a plan writes nothing"

    apply(kubectl, world, namespace, first)
    before = template(world, namespace)
    same = kubectl("quire", "plan", manifest=first)
    assert same.returncode == 0 and "none is started, stopped or replaced" in same.stdout, same
    assert (
        "Children" not in same.stdout
        and "image and pull policy are those of the pods' template" in same.stderr
    )

    port = manifest(namespace, replicas=3, networking={"service": {"port": 8080}})
    planned = kubectl("quire", "plan", manifest=port)
    assert planned.returncode == 0 and "change Service m: spec.ports[0].port: 80 -> 8080" in planned.stdout
    assert "spec.networking: absent -> " in planned.stdout
    apply(kubectl, world, namespace, port)
    assert template(world, namespace) == before

    longer = manifest(namespace, replicas=3, engine={"maxModelLen": 4096})
    planned = kubectl("quire", "plan", manifest=longer)
    assert planned.returncode == 3 and "create ConfigMap m-" in planned.stdout, planned
    assert "2 to 3. stop 1 old and start 1 new: 3 of 3 serve meanwhile each time" in planned.stdout
    assert "one after the other, 2 of 3 serve meanwhile" in planned.stdout
    apply(kubectl, world, namespace, longer)
    assert template(world, namespace) != before

    scaled = manifest(namespace, engine={"maxModelLen": 4096}, autoscaling={"maxReplicas": 2})
    planned = kubectl("quire", "plan", manifest=scaled)
    assert planned.returncode == 0 and "create HorizontalPodAutoscaler m" in planned.stdout, planned
    assert "HPA decides about the number between 1 and 2" in planned.stdout
    assert "it will stop 1 pod: more than 2 run" in planned.stdout
    apply(kubectl, world, namespace, scaled)
    assert world.read("Deployment", namespace, "m")["spec"]["replicas"] == 3


def test_the_plan_warns_of_a_drain_that_exceeds_the_notice_of_a_spot_node(
    namespace: str, kubectl: Run
) -> None:
    spot: Body = {"spot": {"enabled": True}}
    fitting = kubectl("quire", "plan", manifest=manifest(namespace, scheduling=spot))
    assert "Warnings" not in fitting.stdout and "start 1 pod" in fitting.stdout, fitting

    longer = kubectl(
        "quire", "plan", manifest=manifest(namespace, scheduling=spot, drain={"timeoutSeconds": 60})
    )
    text = " ".join(longer.stdout.split())
    assert "Warnings" in text and "pods end within 75 seconds of their deletion" in text, longer


def test_rendered_children_match_those_in_the_cluster(world: World, namespace: str, kubectl: Run) -> None:
    world.client.create({**profiles.profile(resourceName="example.com/one"), "metadata": {"name": namespace}})
    resources = {"cpu": "1", "memory": "2Gi", "profileRef": {"name": namespace}}
    body = manifest(
        namespace, autoscaling={"maxReplicas": 4}, rollout={"restartId": "7"}, resources=resources
    )
    apply(kubectl, world, namespace, body)
    world.make_first_pod(namespace, "m")

    shown = kubectl("quire", "render", "m", "-n", namespace)
    edited = kubectl("quire", "render", manifest={**body, "spec": {**body["spec"], "suspend": True}})

    children = list(yaml_files.load_all(shown.stdout))
    assert {child["kind"] for child in children} >= {"Deployment", "HorizontalPodAutoscaler", "ConfigMap"}
    for child in children:
        live = world.read(child["kind"], namespace, child["metadata"]["name"])
        assert lost_fields(child, live) == []
    suspended = {child["kind"]: child for child in yaml_files.load_all(edited.stdout)}
    assert suspended["Deployment"]["spec"]["replicas"] == 0 and "HorizontalPodAutoscaler" not in suspended


@pytest.mark.deep
def test_the_plan_uses_new_operator_settings_only_when_the_spec_changes(
    world: World, namespace: str, kubectl: Run
) -> None:
    body = manifest(namespace)
    apply(kubectl, world, namespace, body)
    environment = [{"name": "QUIRE_ENGINE_IMAGE", "value": "registry.example/quire-server:2"}]
    labels = {"app.kubernetes.io/name": "quire-operator"}
    template = {
        "metadata": {"labels": labels},
        "spec": {"containers": [{"name": "operator", "image": "o:2", "env": environment}]},
    }
    operator = {
        "metadata": {"name": "quire-operator", "labels": labels},
        "spec": {"selector": {"matchLabels": labels}, "template": template},
    }
    world.create("Deployment", OPERATOR_NAMESPACE, operator)
    try:
        same = kubectl("quire", "plan", manifest=body)
        edited = kubectl("quire", "plan", manifest=manifest(namespace, engine={"maxNumSeqs": 8}))
        fresh = kubectl("quire", "render", manifest=manifest(namespace, engine={"maxNumSeqs": 8}))
    finally:
        world.delete("Deployment", OPERATOR_NAMESPACE, "quire-operator")

    assert same.returncode == 0 and "Children" not in same.stdout, same.stdout
    assert "those of Deployment quire-system/quire-operator" in same.stderr
    assert edited.returncode == 3 and '"registry.example/quire-server:2"' in edited.stdout
    assert 'image: "registry.example/quire-server:2"' in fresh.stdout


def test_invalid_input_is_one_sentence_on_stderr_and_no_traceback(namespace: str, kubectl: Run) -> None:
    both = kubectl("quire", "plan", manifest=manifest(namespace, replicas=3, autoscaling={"maxReplicas": 2}))
    other = kubectl(
        "quire", "plan", manifest={"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}}
    )
    missing = kubectl("quire", "logs", "missing", "-n", namespace)

    assert both.returncode == 1 and "replicas" in both.stderr
    assert other.returncode == 1 and "holds no LLMDeployment: give a manifest with one" in other.stderr
    assert missing.returncode == 1 and '"missing" not found' in missing.stderr
    assert "Traceback" not in both.stderr + other.stderr + missing.stderr
