"""Story: 1 -> 3 -> 1 replicas under streaming load; suspend and resume."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from e2e.kubectl import Kubectl
from e2e.stories.deployment import SERVED_NAME, LLMDeployment
from e2e.stories.load import StreamLoad
from e2e.stories.waiting import eventually


@pytest.mark.deep
def test_scaling_up_and_down_breaks_no_stream(kube: Kubectl, deploy: Callable[..., LLMDeployment]) -> None:
    llm = deploy("scale", replicas=1)
    llm.wait_ready()

    with StreamLoad(llm.base_url, SERVED_NAME, clients=3) as load:
        kube.run("scale", "llmdeployment", llm.name, "-n", llm.namespace, "--replicas=3")
        eventually("three pods serve", lambda: len(llm.endpoints()) == 3)
        load.wait_for_more(3)
        kube.run("scale", "llmdeployment", llm.name, "-n", llm.namespace, "--replicas=1")
        eventually("one pod is left", lambda: len(llm.pods()) == 1 and len(llm.endpoints()) == 1)
        load.wait_for_more(3)

    assert load.broken == []
    llm.wait_settled()


@pytest.mark.deep
def test_suspend_deletes_every_pod_and_resume_serves_again(deploy: Callable[..., LLMDeployment]) -> None:
    llm = deploy("suspend")
    llm.wait_ready()

    llm.patch({"suspend": True})
    eventually("no pod is left", lambda: not llm.pods())
    eventually("the phase says so", lambda: llm.status().get("phase") == "Suspended")
    llm.patch({"suspend": False})
    llm.wait_settled()

    with llm.client() as client:
        assert client.models.list().data[0].id == SERVED_NAME
