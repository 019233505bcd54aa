"""Fixtures of the stories: the cluster, a namespace with the model in it, an LLMDeployment in there.

Every story namespace enforces Pod Security `restricted`, so that a pod which needs more fails every story.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from e2e.kubectl import Kubectl, KubectlError, Manifest
from e2e.stories.deployment import LLMDeployment, small_spec
from e2e.stories.release import OperatorRelease
from e2e.stories.waiting import eventually

ROOT = Path(__file__).parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def kube() -> Kubectl:
    """The cluster that `make up` brought up, or the one that KUBECONFIG names."""
    kubeconfig = Path(os.environ.get("KUBECONFIG") or ROOT / ".cluster" / "kubeconfig")
    kube = Kubectl(ROOT / ".cluster" / "bin", kubeconfig)
    try:
        kube.run("get", "deployment", "-n", "quire-system", "quire-operator")
    except (KubectlError, OSError) as error:
        pytest.skip(f"no cluster with Quire on it (run `make up`): {error}")
    return kube


@pytest.fixture(scope="session")
def operator(kube: Kubectl) -> Iterator[OperatorRelease]:
    """The installed operator, with the fault switch allowed while the stories run."""
    release = OperatorRelease(kube, ROOT)
    release.upgrade("--set", "allowFaults=true")
    yield release
    release.upgrade("--set", "allowFaults=false")


@pytest.fixture(scope="module")
def namespace(kube: Kubectl, operator: OperatorRelease, request: pytest.FixtureRequest) -> Iterator[str]:
    """A restricted namespace named after the story, with the model behind the claim `smollm2`."""
    name = re.sub(r"[^a-z0-9]+", "-", request.module.__name__.rsplit(".", 1)[-1].removeprefix("test_"))
    remove_namespace(kube, name)
    kube.apply(
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": name, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
        }
    )
    kube.apply(*model_volume(name))
    yield name
    remove_namespace(kube, name)


def remove_namespace(kube: Kubectl, name: str) -> None:
    if kube.get("namespace", name, "default") is None:
        return
    kube.run("delete", "llmdeployment", "--all", "-n", name)
    # The namespace controller looks again only after half a grace period: it should find no pod at once.
    eventually(f"the pods of {name} are gone", lambda: not kube.list("pods", name), timeout=180, poll=0.5)
    kube.run("delete", "namespace", name, "--ignore-not-found", "--timeout=240s")
    kube.run("delete", "persistentvolume", f"{name}-smollm2", "--ignore-not-found")


def model_volume(namespace: str, directory: Path | None = None, claim: str = "smollm2") -> list[Manifest]:
    """A PersistentVolume over a directory of the node, bound to `claim` in `namespace`."""
    volume = f"{namespace}-{claim}"
    path = directory or ROOT / ".cluster" / "models" / "smollm2"
    size = {"storage": "1Gi"}
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume},
            "spec": {
                "capacity": size,
                "accessModes": ["ReadOnlyMany"],
                "persistentVolumeReclaimPolicy": "Retain",
                "storageClassName": "",
                "hostPath": {"path": str(path), "type": "Directory"},
                "claimRef": {"namespace": namespace, "name": claim},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": claim, "namespace": namespace},
            "spec": {
                "accessModes": ["ReadOnlyMany"],
                "storageClassName": "",
                "volumeName": volume,
                "resources": {"requests": size},
            },
        },
    ]


@pytest.fixture
def deploy(kube: Kubectl, namespace: str) -> Iterator[Callable[..., LLMDeployment]]:
    """`deploy("name", **spec_changes)` applies an LLMDeployment, gone with its pods after the test."""
    made: list[LLMDeployment] = []

    def make(name: str, **changes: object) -> LLMDeployment:
        llm = LLMDeployment(kube, namespace, name)
        llm.apply(small_spec(**changes))
        made.append(llm)
        return llm

    yield make
    for llm in made:
        kube.delete("llmdeployment", llm.name, namespace)
    for llm in made:
        # A pod that is being deleted still holds memory and processor time, which the next story needs.
        eventually(
            f"the pods of {llm.name} are gone",
            lambda llm=llm: not kube.list("pods", namespace, f"serving.quire.dev/name={llm.name}"),  # type: ignore[misc]
            timeout=120,
            poll=0.5,
        )
