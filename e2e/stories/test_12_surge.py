"""Story: a rollout completes without room for a surge pod, and no stream breaks.

The scarce resource is memory: the replicas request so much that the node has no room for one more.
`e2e/operator/test_scarce.py` does the same with GPUs and without a kubelet.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from e2e.kubectl import Kubectl, Manifest
from e2e.stories.deployment import SERVED_NAME, LLMDeployment
from e2e.stories.load import StreamLoad
from e2e.stories.waiting import eventually
from quire_operator import quantity

pytestmark = pytest.mark.alone  # what is left of the node's memory must stay so

HOSTNAME = "kubernetes.io/hostname"


def settled_pods(kube: Kubectl) -> list[Manifest]:
    """All pods of the cluster; none while some are terminating, such as those of the story before."""
    pods: list[Manifest] = json.loads(kube.run("get", "pods", "--all-namespaces", "-o", "json"))["items"]
    return [] if any("deletionTimestamp" in pod["metadata"] for pod in pods) else pods


def roomiest_node(kube: Kubectl) -> tuple[str, int]:
    """The hostname of the node with the most unrequested memory, and that memory in bytes."""
    pods = eventually("no pod is terminating", lambda: settled_pods(kube))

    def free(node: Manifest) -> int:
        asked = sum(
            quantity.whole_bytes(container["resources"].get("requests", {}).get("memory", "0"))
            for pod in pods
            if pod["spec"].get("nodeName") == node["metadata"]["name"]
            for container in pod["spec"]["containers"]
        )
        return quantity.whole_bytes(node["status"]["allocatable"]["memory"]) - asked

    nodes = [node for node in kube.list("nodes", "") if not node["spec"].get("unschedulable")]
    node = max(nodes, key=free)
    return str(node["metadata"]["labels"][HOSTNAME]), free(node)


@contextmanager
def endpoint_counts(llm: LLMDeployment) -> Iterator[list[int]]:
    """Samples the number of ready endpoints while the `with` block runs."""
    counts: list[int] = []
    stop = threading.Event()

    def count() -> None:
        while not stop.wait(0.3):
            counts.append(len(llm.endpoints()))

    thread = threading.Thread(target=count, daemon=True)
    thread.start()
    try:
        yield counts
    finally:
        stop.set()
        thread.join(timeout=30)


@pytest.mark.deep
def test_a_rollout_without_room_to_surge_completes_and_at_least_one_replica_always_serves(
    kube: Kubectl, deploy: Callable[..., LLMDeployment]
) -> None:
    node, free = roomiest_node(kube)
    memory = f"{int(free / 2.5) // 2**20}Mi"  # two pods fit, three do not
    llm = deploy(
        "scarce",
        replicas=2,
        resources={"cpu": "100m", "memory": memory},
        scheduling={"nodeSelector": {HOSTNAME: node}},
        rollout={"surgeWaitSeconds": 15},
    )
    eventually("two pods serve", lambda: len(llm.endpoints()) == 2)
    llm.wait_ready()
    before = {pod["metadata"]["uid"] for pod in llm.pods()}

    with StreamLoad(llm.base_url, SERVED_NAME) as load, endpoint_counts(llm) as counts:
        llm.patch({"engine": {"maxNumSeqs": 4}})
        llm.wait_reason("RolloutComplete", "WaitingToSurge")
        llm.wait_reason("RolloutComplete", "SurgeUnschedulable")
        llm.wait_settled(timeout=400)
        load.wait_for_more(2)

    assert before.isdisjoint({pod["metadata"]["uid"] for pod in llm.pods()})
    assert min(counts) >= 1
    assert load.broken == []
    (event,) = llm.events("SurgeUnschedulable")
    assert "Insufficient memory" in event["note"]
    assert llm.events("WaitingForNode") == []
    eventually("the next one surges", lambda: llm.status()["rollout"]["strategyInEffect"] == "Surge")
