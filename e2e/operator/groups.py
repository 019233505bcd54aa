"""LeaderWorkerSet itself beside the API server, for tests of what it makes of the operator's objects.

Its controller, its webhooks and Kubernetes' own StatefulSet controller run; pods have no kubelet, so a test
says how they are (`settle`).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from e2e.api.client import RefusedError
from e2e.cluster import lws, pki, programs
from e2e.cluster.apiserver import ApiServer
from e2e.operator import controllers
from e2e.operator.world import PATHS, Body, World
from e2e.ports import free_ports
from e2e.waiting import eventually

ADDRESS = "127.0.0.1"
_ADMISSION = "/apis/admissionregistration.k8s.io/v1"
_NAME = "leaderworkerset.sigs.k8s.io/name"


@contextmanager
def running(server: ApiServer, world: World, directory: Path) -> Iterator[Path]:
    """LeaderWorkerSet, installed and running while the block runs; the log of its controller."""
    programs.build(server.bin_dir, ("lws",))
    for crd in lws.crds():
        world.client.install_crd(crd)
    keys = pki.Authority(directory / "keys")
    keys.issue(pki.Identity("tls", "lws", serves=(ADDRESS,)))
    (port,) = free_ports(1)
    (directory / "config.json").write_text(lws.configuration(ADDRESS, port, keys.directory))
    log = directory / "lws.log"
    command = lws.command(server.bin_dir, directory / "config.json", server.kubeconfig)
    with log.open("wb") as file:
        # The kernel kills it when this process dies.
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            env={"PATH": os.environ["PATH"], "HOME": str(directory)},
            stdout=file,
            stderr=file,
        )
    kinds = ("statefulset-controller", "garbage-collector-controller")
    try:
        for document in lws.webhooks(f"https://{ADDRESS}:{port}", keys.certificate):
            world.client.request("POST", f"{_ADMISSION}/{document['kind'].lower()}s", document)
        with controllers.running(server, *kinds):
            eventually(
                "the webhooks of LeaderWorkerSet", lambda: _answers(world) or process.poll(), seconds=60
            )
            assert process.poll() is None, log.read_text(errors="replace")
            yield log
    finally:
        process.kill()
        process.wait()


def _answers(world: World) -> bool:
    """Whether its webhooks have defaulted and checked an object: a name that is no Service's is refused."""
    body = {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": "1", "namespace": "default"},
        "spec": {"leaderWorkerTemplate": {"workerTemplate": {"spec": {"containers": []}}}},
    }
    try:
        world.client.request("POST", f"{PATHS['LeaderWorkerSet'].format('default')}?dryRun=All", body)
    except RefusedError as error:
        return "DNS-1035" in str(error)
    raise AssertionError("the webhooks of LeaderWorkerSet are not asked")


def group_pods(world: World, namespace: str, name: str) -> dict[str, Body]:
    """The pods of all groups of a LeaderWorkerSet, by name."""
    return {pod["metadata"]["name"]: pod for pod in world.find("Pod", namespace, f"{_NAME}={name}")}


def wait_group_pods(world: World, namespace: str, name: str, count: int) -> dict[str, Body]:
    """The same, once there are so many."""

    def all_there() -> dict[str, Body] | None:
        found = group_pods(world, namespace, name)
        return found if len(found) == count else None

    return eventually(f"{count} pods of {namespace}/{name}", all_there)


def settle(world: World, namespace: str, pod: Body, *, ready: bool = True, restarts: int = 0) -> None:
    """The status that a kubelet would report of a pod that runs."""
    container = pod["spec"]["containers"][0]
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    conditions = [
        {"type": kind, "status": status, "lastTransitionTime": now}
        for kind, status in (("PodScheduled", "True"), ("Ready", "True" if ready else "False"))
    ]
    about = {
        "name": container["name"],
        "image": container["image"],
        "imageID": "",
        "ready": ready,
        "restartCount": restarts,
        "state": {"running": {"startedAt": now}},
    }
    status = {"phase": "Running", "conditions": conditions, "containerStatuses": [about]}
    world.patch("Pod", namespace, pod["metadata"]["name"], {"status": status}, status=True)


def bind(world: World, namespace: str, pod: Body) -> None:
    """Give the pod a node, as the scheduler does. From then on its deletion waits for a kubelet (``end``)."""
    name = pod["metadata"]["name"]
    binding = {"metadata": {"name": name}, "target": {"kind": "Node", "name": "node-1"}}
    world.client.request("POST", f"{PATHS['Pod'].format(namespace)}/{name}/binding", binding)


def end(world: World, namespace: str, name: str) -> None:
    """What a kubelet does once the containers of a pod that is deleted have ended."""
    world.client.request("DELETE", f"{PATHS['Pod'].format(namespace)}/{name}?gracePeriodSeconds=0")


def is_ending(pod: Body) -> bool:
    """Whether its containers have got their signal."""
    return "deletionTimestamp" in pod["metadata"]
