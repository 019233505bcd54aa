"""Fixtures of the stories: the cluster, a namespace that holds the model, and LLMDeployments in it.

The stories share one cluster. Most may run side by side, each in its namespace; those that change or measure
what all share are marked `alone`, run one after the other and have the higher numbers. Every namespace
enforces Pod Security `restricted`, so that a pod that needs more privileges fails its story. It is deleted
while the next story runs, and awaited only where a run is repeated.
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
from e2e.stories.write_record import AuditLog, ManagedFields, WriteRecord
from e2e.up.place import Place
from e2e.up.volume import Volumes

ROOT = Path(__file__).parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def place() -> Place:
    """The cluster that `make up` brought up, or the one that KUBECONFIG names."""
    place = Place.of(ROOT, os.environ)
    try:
        place.kubectl.run("get", "deployment", "-n", "quire-system", "quire-operator")
        service = place.kubectl.get("services", "kubernetes", "default")
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
    """The installed operator, which allows fault injection (QUIRE_FAULT) while the stories run.

    Stories that run side by side cannot each change the release, so it must allow that before.
    """
    write_record: WriteRecord = ManagedFields(place.kubectl, MANAGER)
    if place.is_ours:
        write_record = AuditLog(place.checkout.audit_log, USER)
    release = OperatorRelease(place.kubectl, ROOT, write_record)
    is_beside_others = "PYTEST_XDIST_WORKER" in os.environ
    if not release.allows_faults():
        assert not is_beside_others, "run `python -m e2e.up --set allowFaults=true` first"
        release.upgrade("--set", "allowFaults=true")
    yield release
    if not is_beside_others:
        release.upgrade("--set", "allowFaults=false")


@pytest.fixture(scope="session")
def volumes(place: Place, operator: OperatorRelease) -> Volumes:
    """Provides a model to a namespace as a PersistentVolumeClaim."""
    return place.volumes(operator.engine_image())


@pytest.fixture(scope="module")
def namespace(kube: Kubectl, volumes: Volumes, place: Place, request: pytest.FixtureRequest) -> Iterator[str]:
    """A restricted namespace named after the story; its claim `smollm2` holds the model."""
    name = re.sub(r"[^a-z0-9]+", "-", request.module.__name__.rsplit(".", 1)[-1].removeprefix("test_"))
    kube.run("delete", "namespace", name, "--ignore-not-found", "--timeout=300s")
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
    volumes.provide(place.model, name)
    yield name
    kube.run("delete", "llmdeployment", "--all", "-n", name)
    kube.run("delete", "deployment,replicaset,pod", "--all", "-n", name, "--now", "--wait=false")
    volumes.remove(name)
    kube.run("delete", "namespace", name, "--wait=false")


@pytest.fixture
def deploy(kube: Kubectl, namespace: str) -> Iterator[Callable[..., LLMDeployment]]:
    """`deploy("name", **spec_changes)` applies an LLMDeployment; the test ends with its deletion."""
    made: list[LLMDeployment] = []

    def make(name: str, **changes: object) -> LLMDeployment:
        llm = LLMDeployment(kube, namespace, name)
        llm.apply(small_spec(**changes))
        made.append(llm)
        return llm

    yield make
    for llm in made:
        llm.remove()
