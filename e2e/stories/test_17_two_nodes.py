"""Story: the ranks of a model are on two nodes, and every part of the group is lost once.

Each replica is a group of two pods, which LeaderWorkerSet replaces as a whole. The nodes are those of
`make up NODES=2`, whose wire can be cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from openai import APIError

from e2e import cluster
from e2e.cluster import Cluster, cgroups, network
from e2e.kubectl import Kubectl, Manifest
from e2e.stories.deployment import SERVED_NAME, LLMDeployment, small_spec
from e2e.stories.load import StreamLoad
from e2e.stories.test_06_drain import finish_reason, started_stream
from e2e.stories.test_12_ranks import EXACT, answers
from e2e.stories.waiting import eventually
from e2e.up.place import Place

pytestmark = pytest.mark.alone  # pods of all stories could be placed on the second node, and would be lost

# Three ranks of SmolLM2 in each pod, one pod after the other with its half of the model's bytes.
ONE = {"engine": EXACT, "resources": {"cpu": "1500m", "memory": "3Gi"}}
GROUP = {**ONE, "parallelism": {"tensor": 3, "pipeline": 2, "nodes": 2}}
# Two such groups have room on nodes of two CPUs.
SMALL_GROUP = {
    "engine": EXACT,
    "resources": {"cpu": "500m", "memory": "2Gi"},
    "parallelism": {"pipeline": 2, "nodes": 2},
}
COMPUTES = (b"quire_server.engine", b"quire_server.engine.rank")
# Run inside a pod: kills one process that computes, and prints its number.
KILL_A_RANK = f"""
import os, pathlib, signal
for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    if not {set(COMPUTES)}.isdisjoint(path.read_bytes().split(b"\\0")):
        os.kill(int(path.parent.name), signal.SIGKILL)
        print(path.parent.name)
        break
"""


@pytest.fixture(scope="module")
def nodes(place: Place, kube: Kubectl) -> Iterator[tuple[Cluster, Cluster]]:
    """Both nodes. While the story lasts pods are placed on the second one, too."""
    if not place.is_ours or len(kube.list("nodes", "")) < 2:
        pytest.skip("the cluster has one node, or a wire that cannot be cut: `make up NODES=2` has two")
    first = cluster.current(place.checkout.root)
    (second,) = first.others
    kube.run("uncordon", second.name)
    yield first, second
    kube.run("cordon", second.name)


@dataclass(frozen=True)
class Groups:
    """The replicas of an LLMDeployment, each of which is a pod on either node."""

    llm: LLMDeployment
    num_pods: int

    def wait(self, without: frozenset[str] = frozenset()) -> frozenset[str]:
        """Waits until all pods are ready and none of them is one of those before; returns their uids."""

        def renewed() -> frozenset[str] | None:
            uids = frozenset(pod["metadata"]["uid"] for pod in self.llm.ready_pods())
            return uids if len(uids) == self.num_pods and not uids & without else None

        uids = eventually(f"{self.num_pods} new pods are ready", renewed, poll=0.5)
        self.llm.wait_settled()
        return uids

    def by_role(self) -> tuple[Manifest, Manifest]:
        """Leader and worker of the only group."""
        leader, worker = sorted(self.llm.ready_pods(), key=lambda pod: str(pod["metadata"]["name"]))
        return leader, worker


@pytest.fixture
def one_group(nodes: tuple[Cluster, Cluster], deploy: Callable[..., LLMDeployment]) -> Groups:
    """One replica, ready."""
    # Long enough for a stream of 300 tokens on a busy machine.
    drain = {"preStopSeconds": 3, "timeoutSeconds": 300}
    groups = Groups(deploy("two-nodes", drain=drain, **GROUP), num_pods=2)
    groups.wait()
    return groups


def name_of(pod: Manifest) -> str:
    return str(pod["metadata"]["name"])


def ranks(node: Cluster, pods: frozenset[str]) -> set[int]:
    """The processes that compute for these pods (by uid) on a node, wherever they can be reached from."""
    found = set()
    for pid in cgroups.processes(node.checkout.cgroup):
        process = Path("/proc") / str(pid)
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
            group = (process / "cgroup").read_text()
        except OSError:
            continue  # it has just ended
        if not set(COMPUTES).isdisjoint(command) and any(uid in group for uid in pods):
            found.add(pid)
    return found


def test_a_model_on_two_nodes_answers_as_on_one(
    kube: Kubectl, nodes: tuple[Cluster, Cluster], deploy: Callable[..., LLMDeployment]
) -> None:
    llm = deploy("two-nodes", **ONE, rollout={"strategy": "InPlace"})  # there is no room for both forms
    llm.wait_ready()
    expected = answers(llm)
    assert "Paris" in expected[0]

    llm.patch({"parallelism": GROUP["parallelism"]})
    groups = Groups(llm, num_pods=2)
    groups.wait()
    assert {pod["spec"]["nodeName"] for pod in groups.by_role()} == {node.name for node in nodes}
    assert answers(llm) == expected


@pytest.mark.deep
@pytest.mark.parametrize("role", [1, 0], ids=["worker", "leader"])
def test_a_model_on_two_nodes_comes_back_after_a_killed_rank(
    kube: Kubectl, one_group: Groups, role: int
) -> None:
    llm = one_group.llm
    expected = answers(llm)
    uids = frozenset(pod["metadata"]["uid"] for pod in llm.ready_pods())

    victim = name_of(one_group.by_role()[role])
    with llm.client() as client:
        chunks = started_stream(client)
        killed = kube.run("exec", "-n", llm.namespace, victim, "--", "python", "-c", KILL_A_RANK)
        assert killed.strip().isdigit(), "a process was killed"
        with pytest.raises(APIError):
            finish_reason(chunks)
    one_group.wait(without=uids)

    assert answers(llm) == expected


@pytest.mark.deep
def test_a_cut_link_ends_the_group_on_both_nodes_and_it_serves_again_when_the_link_is_back(
    nodes: tuple[Cluster, Cluster], one_group: Groups
) -> None:
    expected = answers(one_group.llm)
    uids = one_group.wait()
    before = [ranks(node, uids) for node in nodes]
    assert all(before), "either node has ranks"

    network.cut_wire(nodes[1])
    try:
        eventually(
            "the ranks on both sides have ended",
            lambda: not any(old & ranks(node, uids) for old, node in zip(before, nodes, strict=True)),
            timeout=30,
            poll=0.1,
        )
    finally:
        network.mend_wire(nodes[1])

    one_group.wait(without=uids)
    assert answers(one_group.llm) == expected


@pytest.mark.deep
def test_a_worker_that_is_deleted_alone_takes_its_group_with_it_after_the_stream(
    kube: Kubectl, one_group: Groups
) -> None:
    llm, uids = one_group.llm, one_group.wait()
    expected = answers(llm)
    with llm.client() as client:
        chunks = started_stream(client)
        kube.delete("pod", name_of(one_group.by_role()[1]), llm.namespace, "--wait=false")
        assert finish_reason(chunks) == "length", "the stream did not run to its end"
    one_group.wait(without=uids)
    assert answers(llm) == expected


@pytest.mark.deep
def test_a_rollout_of_groups_breaks_no_stream(
    nodes: tuple[Cluster, Cluster], deploy: Callable[..., LLMDeployment]
) -> None:
    del nodes
    llm = deploy("rollout", replicas=2, **SMALL_GROUP)
    groups = Groups(llm, num_pods=4)
    uids = groups.wait()
    with StreamLoad(llm.base_url, SERVED_NAME) as load:
        llm.patch({"engine": {"maxNumSeqs": small_spec()["engine"]["maxNumSeqs"] - 1}})
        groups.wait(without=uids)
        load.wait_for_more(2)
    assert load.broken == []
    assert load.whole
