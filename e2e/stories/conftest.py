"""Fixtures of the stories: the cluster, a namespace that holds the model, and LLMDeployments in it.

The stories share one cluster. Most may run side by side, each in its namespace; those that change or measure
what all share are marked `alone`, run one after the other and have the higher numbers. Every namespace
enforces Pod Security `restricted`, so that a pod that needs more privileges fails its story. It is deleted
while the next story runs. What the whole run needs is prepared once, by the process that starts the workers.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from e2e import cluster
from e2e.kubectl import Kubectl, KubectlError
from e2e.stories.deployment import LLMDeployment, small_spec
from e2e.stories.release import MANAGER, USER, OperatorRelease
from e2e.stories.write_record import AuditLog, ManagedFields, WriteRecord
from e2e.up.place import Place
from e2e.up.volume import Volumes

ROOT = Path(__file__).parents[2]
STORY = {"quire-story": "true"}  # label of every story namespace


def pytest_sessionstart(session: pytest.Session) -> None:
    """Deletes what an interrupted run left, leaves one node to the stories (that of two nodes takes the other
    one back) and allows fault injection (QUIRE_FAULT) meanwhile.
    """
    place = Place.of(ROOT, os.environ)
    if _prepares(session.config) and not _hindrance(place):
        place.kubectl.run("delete", "namespaces", "--selector=quire-story=true", "--timeout=300s")
        for node in _further_nodes(place):
            drain = ("--ignore-daemonsets", "--delete-emptydir-data", "--timeout=180s")
            place.kubectl.run("drain", node, *drain)
        _release(place).upgrade("--set", "allowFaults=true", "--set", "credentialHosts={*.svc}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Undoes it, also after a failure."""
    place = Place.of(ROOT, os.environ)
    if _prepares(session.config) and not _hindrance(place):
        for node in _further_nodes(place):
            place.kubectl.run("uncordon", node)
        _release(place).upgrade("--set", "allowFaults=false", "--set-json", "credentialHosts=[]")


def _prepares(config: pytest.Config) -> bool:
    is_worker = hasattr(config, "workerinput")
    return not is_worker and not config.option.collectonly


def _hindrance(place: Place) -> str:
    """Why no story can run on the cluster; empty if they can."""
    try:
        place.kubectl.run("get", "deployment", "-n", "quire-system", "quire-operator")
        service = place.kubectl.get("services", "kubernetes", "default")
    except (KubectlError, OSError) as error:
        return f"no cluster with Quire on it (run `make up`): {error}"
    assert service is not None
    address = (service["spec"]["clusterIP"], service["spec"]["ports"][0]["port"])
    try:
        socket.create_connection(address, timeout=10).close()
    except OSError as error:
        return f"the stories' clients need a route to the cluster's Services, such as {address}: {error}"
    return ""


def _further_nodes(place: Place) -> list[str]:
    """All but the first of our own cluster. They have no images yet, and a story loses them."""
    return [each.name for each in cluster.current(ROOT).others] if place.is_ours else []


def _release(place: Place) -> OperatorRelease:
    write_record: WriteRecord = ManagedFields(place.kubectl, MANAGER)
    if place.is_ours:
        write_record = AuditLog(place.checkout.audit_log, USER)
    return OperatorRelease(place.kubectl, ROOT, write_record)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def place() -> Place:
    """The cluster that `make up` brought up, or the one that KUBECONFIG names."""
    place = Place.of(ROOT, os.environ)
    if hindrance := _hindrance(place):
        pytest.skip(hindrance)
    return place


@pytest.fixture(scope="session")
def kube(place: Place) -> Kubectl:
    return place.kubectl


@pytest.fixture(scope="session")
def operator(place: Place) -> OperatorRelease:
    """The installed operator, which allows fault injection."""
    return _release(place)


@pytest.fixture(autouse=True)
def check_alone(request: pytest.FixtureRequest) -> None:
    """Fails a story that is marked `alone` and runs beside others."""
    if request.node.get_closest_marker("alone") and "PYTEST_XDIST_WORKER" in os.environ:
        pytest.fail("this story runs beside no other: leave out -n, as `make stories-alone` does")


@pytest.fixture(scope="session")
def volumes(place: Place, operator: OperatorRelease) -> Volumes:
    """Provides a model to a namespace as a PersistentVolumeClaim."""
    return place.volumes(operator.engine_image())


@pytest.fixture(scope="module")
def namespace(kube: Kubectl, volumes: Volumes, place: Place, request: pytest.FixtureRequest) -> Iterator[str]:
    """A restricted namespace named after the story; its claim `smollm2` holds the model."""
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
