"""An API server with workload controllers, a proxy in front of it, and the result of an undisturbed run."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.chaos.children import Body, children
from e2e.cluster import host
from e2e.cluster.apiserver import ApiServer
from e2e.operator import controllers
from e2e.operator.audited import audited
from e2e.operator.fixtures import kubeconfig, namespace, server, world
from e2e.operator.process import OperatorProcess
from e2e.operator.proxy import Proxy, proxied
from e2e.operator.world import World
from e2e.waiting import eventually

__all__ = ["kubeconfig", "namespace", "server", "world"]

CONTROLLERS = (
    "deployment-controller",
    "replicaset-controller",
    "garbage-collector-controller",
    "namespace-controller",
)

#: Specs one after another, as a user edits them.
CREATED: Mapping[str, Any] = {"replicas": 1}
UPDATED: Mapping[str, Any] = {"engine": {"maxModelLen": 2048}}
SCALED: Mapping[str, Any] = {"replicas": 3}


@pytest.fixture(scope="session")
def audited_world() -> Iterator[tuple[ApiServer, World]]:
    with audited() as (server, world), controllers.running(server, *CONTROLLERS):
        yield server, world


@pytest.fixture
def proxy(server: ApiServer) -> Iterator[Proxy]:
    with proxied(server) as proxy:
        yield proxy


@pytest.fixture
def start(proxy: Proxy, kubeconfig: Path, tmp_path: Path) -> Iterator[Callable[..., OperatorProcess]]:
    """Starts replicas that reach the API server only through the proxy."""
    started: list[OperatorProcess] = []
    config = yaml.safe_load(kubeconfig.read_text(encoding="utf-8"))
    config["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{proxy.port}"
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config), encoding="utf-8")

    def start(name: str, **environ: str) -> OperatorProcess:
        started.append(OperatorProcess(name, tmp_path / "kubeconfig", tmp_path, **environ).start())
        return started[-1]

    yield start
    proxy.away, proxy.refusal, proxy.latency, proxy.fault = False, 0, 0.0, lambda: None
    for process in started:
        process.stop()


@pytest.fixture(scope="session")
def undisturbed(
    world: World, kubeconfig: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Body]]:
    """The children after each step of a run without faults: created, updated, scaled."""
    namespace = world.namespace(f"calm-{secrets.token_hex(4)}")
    operator = OperatorProcess(
        "calm", kubeconfig, tmp_path_factory.mktemp("calm"), QUIRE_WATCH_NAMESPACES=namespace
    )
    try:
        operator.start().wait_leading(world)
        world.deploy(namespace, "m", **CREATED)
        steps = {"created": settled(world, namespace)}
        for step, edit in (("updated", UPDATED), ("scaled", SCALED)):
            world.patch("LLMDeployment", namespace, "m", {"spec": dict(edit)})
            steps[step] = settled(world, namespace)
    finally:
        operator.stop()
    assert len(steps["created"]) == 7 and len({str(step) for step in steps.values()}) == 3
    return steps


def settled(world: World, namespace: str, name: str = "m") -> dict[str, Body]:
    """Its children once the operator and the controllers have processed the current spec: after an outage the
    controllers retry every 30 to 60 seconds only.
    """
    eventually(f"{namespace}/{name} is answered to", lambda: is_settled(world, namespace, name))
    return children(world, namespace, name)


def is_settled(world: World, namespace: str, name: str = "m") -> bool:
    model, live = world.read("LLMDeployment", namespace, name), world.get("Deployment", namespace, name)
    return (
        live is not None
        and model.get("status", {}).get("observedGeneration") == model["metadata"]["generation"]
        and live.get("status", {}).get("observedGeneration") == live["metadata"]["generation"]
        and live["status"].get("replicas", 0) >= live["spec"]["replicas"]
        and world.has_children(namespace, name)
    )


@pytest.fixture(scope="session")
def libfaketime() -> str:
    """The library that gives a process a clock of its own; Debian's, installed when it is asked for."""
    if not (found := _libfaketime()):
        host.install(["libfaketime"])
        found = _libfaketime()
    return found[0]


def _libfaketime() -> list[str]:
    return [str(path) for path in Path("/usr/lib").glob("*/faketime/libfaketime.so.1")]
