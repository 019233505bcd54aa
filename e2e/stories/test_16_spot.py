"""Story: a spot node is reclaimed while its pod streams an answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from e2e.kubectl import Kubectl
from e2e.stories.deployment import LLMDeployment
from e2e.stories.release import NAMESPACE
from e2e.stories.test_06_drain import DRAIN, finish_reason, started_stream
from e2e.stories.waiting import eventually

pytestmark = pytest.mark.alone  # the node's taint evicts the pods of all stories
TAINT = "cloud.google.com/impending-node-termination"


@pytest.fixture
def node(kube: Kubectl) -> Iterator[str]:
    """The only node for pods. Afterwards its taint is removed and the operator's rollout awaited."""
    (node,) = [node for node in kube.list("nodes", "") if not node["spec"].get("unschedulable")]
    name = node["metadata"]["name"]
    yield name
    kube.run("taint", "node", name, f"{TAINT}-")
    for deployment in kube.list("deployments", NAMESPACE):
        target = f"deployment/{deployment['metadata']['name']}"
        kube.run("rollout", "status", target, "-n", NAMESPACE, "--timeout=120s")


@pytest.mark.deep
def test_a_spot_node_that_is_reclaimed_drains_at_once_and_finishes_the_stream(
    kube: Kubectl, deploy: Callable[..., LLMDeployment], node: str
) -> None:
    llm = deploy("spot", replicas=1, drain=DRAIN, scheduling={"spot": {"enabled": True}})
    llm.wait_ready()
    (pod,) = llm.pods()
    name = pod["metadata"]["name"]

    with llm.client() as held:
        chunks = started_stream(held)
        kube.run("taint", "node", node, f"{TAINT}:NoExecute")
        assert TAINT in str((kube.get("nodes", node) or {}).get("spec", {}).get("taints")), "it is tainted"
        eventually("the pod left the Service", lambda: name not in llm.endpoints())
        finish = finish_reason(chunks)

    assert finish == "length", "the stream on the reclaimed node did not run to its end"
