"""Fixtures of the stories: the cluster, a namespace with the model in it, an LLMDeployment in there.

Every story namespace enforces Pod Security `restricted`, so that a pod which needs more fails every story.
What a story leaves goes away while the next one runs; the last fixture waits until all of it is gone.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from e2e.kubectl import Kubectl, KubectlError
from e2e.stories.deployment import LLMDeployment, small_spec
from e2e.stories.release import MANAGER, USER, OperatorRelease
from e2e.stories.trail import AuditLog, ManagedFields, Trail
from e2e.up.place import Place
from e2e.up.volume import Volumes

ROOT = Path(__file__).parents[2]
STORY = {"quire-story": "true"}  # the label of their namespaces


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def place() -> Place:
    """The cluster that `make up` brought up, or the one that KUBECONFIG names."""
    place = Place.of(ROOT, os.environ)
    try:
        place.kubectl.run("get", "deployment", "-n", "quire-system", "quire-operator")
        service = place.kubectl.get("service", "kubernetes", "default")
    except (KubectlError, OSError) as error:
        pytest.skip(f"no cluster with Quire on it (run `make up`): {error}")
    assert service is not None
    address = (service["spec"]["clusterIP"], service["spec"]["ports"][0]["port"])
    try:
        socket.create_connection(address, timeout=10).close()
    except OSError as error:
        pytest.skip(
            f"the stories' clients need a route to the cluster's Services, such as {address}: {error}"
        )
    return place


@pytest.fixture(scope="session")
def kube(place: Place) -> Kubectl:
    return place.kubectl


@pytest.fixture(scope="session")
def operator(place: Place) -> Iterator[OperatorRelease]:
    """The installed operator, with the fault switch allowed while the stories run."""
    trail: Trail = ManagedFields(place.kubectl, MANAGER)
    if place.is_ours:
        trail = AuditLog(place.checkout.audit_log, USER)
    release = OperatorRelease(place.kubectl, ROOT, trail)
    release.upgrade("--set", "allowFaults=true")
    yield release
    release.upgrade("--set", "allowFaults=false")


@pytest.fixture(scope="session")
def volumes(place: Place, operator: OperatorRelease) -> Volumes:
    """How a model gets behind a claim."""
    return place.volumes(operator.engine_image())


@pytest.fixture(scope="session")
def clean(kube: Kubectl) -> Iterator[None]:
    """No namespace of a story is there before the first, and none is left after the last."""

    def wait_until_gone() -> None:
        kube.run("delete", "namespaces", "--selector=quire-story=true", "--timeout=300s")

    wait_until_gone()
    yield
    wait_until_gone()


@pytest.fixture(scope="module")
def namespace(
    kube: Kubectl, clean: None, volumes: Volumes, place: Place, request: pytest.FixtureRequest
) -> Iterator[str]:
    """A restricted namespace named after the story, with the model behind the claim `smollm2`."""
    name = re.sub(r"[^a-z0-9]+", "-", request.module.__name__.rsplit(".", 1)[-1].removeprefix("test_"))
    labels = {"pod-security.kubernetes.io/enforce": "restricted", **STORY}
    kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
    volumes.provide(place.model, name)
    yield name
    kube.run("delete", "llmdeployment", "--all", "-n", name)
    kube.run("delete", "deployment,replicaset,pod", "--all", "-n", name, "--now", "--wait=false")
    volumes.remove(name)
    kube.run("delete", "namespace", name, "--wait=false")


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
        llm.remove()
