"""The API server with the adapter behind its aggregator, as the tests use it."""

from __future__ import annotations

import base64
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from e2e.api.client import Client, RefusedError
from e2e.cluster.apiserver import ApiServer
from e2e.metrics_adapter.engines import Answer, Engine, make_pod, serving
from e2e.metrics_adapter.replica import SERVICE
from e2e.metrics_adapter.service import Balancer, balancing
from e2e.operator import rights
from e2e.operator.world import OPERATOR_NAMESPACE, World
from e2e.waiting import eventually

VERSIONS = ("v1beta1", "v1beta2")
API_SERVICES = "/apis/apiregistration.k8s.io/v1/apiservices"
RESOURCE = "llmdeployments.serving.quire.dev"

Body = dict[str, Any]


def path(namespace: str, name: str, metric: str = "llm_queue_depth", version: str = "v1beta2") -> str:
    return f"/apis/custom.metrics.k8s.io/{version}/namespaces/{namespace}/{RESOURCE}/{name}/{metric}"


@dataclass(frozen=True)
class Cluster:
    """`service` is between the aggregator and the replicas; engines listen at `engine_port`."""

    server: ApiServer
    world: World
    service: Balancer
    engine_port: int
    stack: ExitStack

    def engine(self, namespace: str, deployment: str, answer: Answer) -> Engine:
        """A ready pod that answers."""
        context: AbstractContextManager[Engine] = serving(self.engine_port, answer)
        engine = self.stack.enter_context(context)
        make_pod(self.world, namespace, deployment, engine.ip)
        return engine

    def items(self, namespace: str, name: str, metric: str, query: str = "") -> list[Body]:
        answer = self.world.client.request("GET", path(namespace, name, metric) + query)
        items: list[Body] = answer["items"]
        return items

    def value(self, namespace: str, name: str, metric: str = "llm_queue_depth") -> str:
        """The value through the aggregator; the error message where there is none."""
        try:
            (item,) = self.items(namespace, name, metric)
        except RefusedError as error:
            return str(error)
        return str(item["value"])

    def wait_value(self, namespace: str, name: str, value: str) -> None:
        """Until this many requests are queued."""
        self._wait(namespace, name, lambda found: found == value, value)

    def wait_refusal(self, namespace: str, name: str, why: str) -> None:
        """Until there is no value, for that reason."""
        self._wait(namespace, name, lambda found: why in found, why)

    def _wait(self, namespace: str, name: str, fits: Callable[[str], bool], what: str) -> None:
        eventually(f"the queue of {name}: {what}", lambda: fits(self.value(namespace, name)))

    def api_service(self, version: str) -> Body:
        return self.world.client.request("GET", f"{API_SERVICES}/{version}.custom.metrics.k8s.io")

    def bundle(self, version: str = "v1beta2") -> bytes:
        return base64.b64decode(self.api_service(version)["spec"].get("caBundle", ""))

    def wait_available(self) -> None:
        eventually(f"{VERSIONS} are available", lambda: all(map(self._is_available, VERSIONS)))

    def _is_available(self, version: str) -> bool:
        conditions = self.api_service(version).get("status", {}).get("conditions", [])
        return [c["status"] for c in conditions if c["type"] == "Available"] == ["True"]

    def kubectl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.server.bin_dir / "kubectl"), f"--kubeconfig={self.server.kubeconfig}", *arguments]
        return subprocess.run(
            [*command, f"--cache-dir={self.server.directory}/kubectl"],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip


@contextmanager
def aggregated(engine_port: int) -> Iterator[Cluster]:
    """The chart's RBAC and APIServices; the Service points to loopback, because there is no node, and has no
    backend yet.
    """
    with ExitStack() as stack:
        server = stack.enter_context(ApiServer())
        client = stack.enter_context(Client(server.kubeconfig))
        client.install_crd()
        world = World(client, server.directory / "no-audit")
        world.namespace(OPERATOR_NAMESPACE)
        chart = rights.rendered_chart()
        rights.install(world, chart)
        service = stack.enter_context(balancing())
        external = {"type": "ExternalName", "externalName": "localhost"}
        world.create("Service", OPERATOR_NAMESPACE, {"metadata": {"name": SERVICE}, "spec": external})
        for body in (body for body in chart if body["kind"] == "APIService"):
            body["spec"]["service"]["port"] = service.port
            client.request("POST", API_SERVICES, body)
        yield Cluster(server, world, service, engine_port, stack)
