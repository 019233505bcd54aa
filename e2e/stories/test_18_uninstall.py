"""Story: deleting an LLMDeployment deletes its objects; uninstalling the operator deletes no model.

What is marked alone runs last, so it also looks at what the operator wrote in all stories.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from e2e.kubectl import Kubectl
from e2e.stories.deployment import CHILDREN, NAME_LABEL, SERVED_NAME, LLMDeployment
from e2e.stories.release import NAMESPACE, RELEASE, OperatorRelease
from e2e.stories.waiting import eventually


@pytest.mark.alone  # and last
def test_the_operator_wrote_only_kinds_that_it_needs(operator: OperatorRelease) -> None:
    """After all stories before, which made it write what it ever writes."""
    written = {what.split()[0] for what in operator.write_record.writes()}

    assert written <= {
        "configmaps", "controllerrevisions", "deployments", "events", "horizontalpodautoscalers", "jobs",
        "leaderworkersets", "leases", "llmdeployments/status", "networkpolicies", "persistentvolumeclaims",
        "poddisruptionbudgets", "pods", "selfsubjectaccessreviews", "serviceaccounts", "services",
    }  # fmt: skip


def test_deleting_the_deployment_deletes_everything_it_owned(
    kube: Kubectl, deploy: Callable[..., LLMDeployment]
) -> None:
    llm = deploy("leaver")
    llm.wait_ready()

    kube.delete("llmdeployment", llm.name, llm.namespace, "--timeout=30s")

    def has_none(resource: str) -> bool:
        return not kube.list(resource, llm.namespace, f"{NAME_LABEL}={llm.name}")

    for resource in (*CHILDREN, "replicasets", "pods"):
        eventually(
            f"no {resource} is left",
            partial(has_none, resource),
            timeout=120,
        )


@pytest.mark.alone  # the operator is uninstalled
def test_pods_keep_serving_without_the_operator_and_no_finalizer_blocks_a_deletion(
    kube: Kubectl, operator: OperatorRelease, deploy: Callable[..., LLMDeployment]
) -> None:
    llm = deploy("orphan")
    llm.wait_ready()
    pods = {pod["metadata"]["uid"] for pod in llm.pods()}
    values = operator.values()

    kube.helm("uninstall", RELEASE, "-n", NAMESPACE, "--wait", "--timeout=120s")
    try:
        eventually("no operator pod is left", lambda: not operator.pods())
        with llm.client() as client:
            answer = client.completions.create(model=SERVED_NAME, prompt="The sky is", max_tokens=4)
        assert answer.choices[0].text
        assert {pod["metadata"]["uid"] for pod in llm.pods()} == pods
        # The CRD was kept and the object has no finalizer, so it can be deleted without an operator.
        kube.delete("llmdeployment", llm.name, llm.namespace, "--timeout=20s")
        assert kube.get("llmdeployments", llm.name, llm.namespace) is None
    finally:
        operator.install(values)
