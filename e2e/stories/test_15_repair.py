"""Story: deleted or edited child objects are restored; a restart of the operator changes nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial

import pytest

from e2e.kubectl import Kubectl, Manifest
from e2e.stories.deployment import CHILDREN, NAME_LABEL, LLMDeployment
from e2e.stories.release import OperatorRelease
from e2e.stories.waiting import eventually

pytestmark = pytest.mark.alone  # the operator's writes are counted

EDITS: dict[str, Manifest] = {
    "deployments": {"spec": {"progressDeadlineSeconds": 33}},
    "services": {"spec": {"selector": {NAME_LABEL: "another"}}},
    "serviceaccounts": {"automountServiceAccountToken": True},
    "poddisruptionbudgets": {"spec": {"maxUnavailable": 0}},
    "networkpolicies": {"spec": {"ingress": []}},
}


def child_object(kube: Kubectl, llm: LLMDeployment, kind: str) -> Manifest | None:
    """The one child of a kind; the ConfigMap of golden tokens, which is there once a pod was ready, aside."""
    found = kube.list(kind, llm.namespace, f"{NAME_LABEL}={llm.name}")
    return next((each for each in found if each["metadata"]["name"] != golden_tokens(llm)), None)


def golden_tokens(llm: LLMDeployment) -> str:
    return f"{llm.name}-golden-tokens"


def test_every_deleted_or_edited_child_is_restored_within_two_seconds(
    kube: Kubectl, deploy: Callable[..., LLMDeployment], capsys: pytest.CaptureFixture[str]
) -> None:
    llm = deploy("repair")
    llm.wait_ready()
    took: dict[str, float] = {}

    for kind in CHILDREN:
        before = eventually(f"the {kind} is there", partial(child_object, kube, llm, kind))
        kube.delete(kind, before["metadata"]["name"], llm.namespace, "--wait=false", "--cascade=orphan")
        start = time.monotonic()
        eventually(
            f"the deleted {kind} is back",
            lambda kind=kind, uid=before["metadata"]["uid"]: (  # type: ignore[misc]  # mypy infers no lambda that has a default
                (now := child_object(kube, llm, kind)) and now["metadata"]["uid"] != uid
            ),
            poll=0.05,
        )
        took[f"delete {kind}"] = time.monotonic() - start

    for kind, edit in EDITS.items():
        before = eventually(f"the {kind} is there", partial(child_object, kube, llm, kind))
        edited = kube.patch(kind, before["metadata"]["name"], llm.namespace, edit)
        start = time.monotonic()
        assert not restored(edited, before, edit_of=edit), f"the edit of the {kind} changed nothing"
        eventually(
            f"the edited {kind} is as before",
            lambda kind=kind, before=before: (
                (now := child_object(kube, llm, kind)) and restored(now, before, edit_of=EDITS[kind])
            ),  # type: ignore[misc]  # mypy infers no lambda that has a default
            poll=0.05,
        )
        took[f"edit {kind}"] = time.monotonic() - start

    with capsys.disabled():
        print("\n  " + ", ".join(f"{what} {seconds:.2f} s" for what, seconds in took.items()))
    assert {what: seconds for what, seconds in took.items() if seconds > 2.0} == {}


def restored(now: Manifest, before: Manifest, *, edit_of: Manifest) -> bool:
    """True when every field of the edit has its earlier value again."""
    return all(
        restored(now.get(key, {}), before.get(key, {}), edit_of=value)
        if isinstance(value, dict)
        else now.get(key) == before.get(key)
        for key, value in edit_of.items()
    )


@pytest.mark.deep
def test_ten_restarts_of_the_operator_change_no_pod_and_write_only_the_lease(
    kube: Kubectl, operator: OperatorRelease, deploy: Callable[..., LLMDeployment]
) -> None:
    llm = deploy("steady")
    llm.wait_settled()
    eventually(
        "the canary's tokens are kept",
        lambda: (
            golden_tokens(llm)
            in {each["metadata"]["name"] for each in kube.list("configmaps", llm.namespace)}
        ),
    )
    pods = {pod["metadata"]["uid"]: restart_count(pod) for pod in llm.pods()}
    versions = eventually(
        "no object changes any more",
        lambda: (now := resource_versions(kube, llm)) == resource_versions(kube, llm) and now,
    )
    written = operator.write_record.writes()
    assert any(what.startswith("llmdeployments/status ") for what in written), (
        "the record does not show the operator's writes"
    )

    for _ in range(10):
        operator.restart()
    assert resource_versions(kube, llm) == versions
    edited = kube.patch("service", llm.name, llm.namespace, {"spec": {"selector": {NAME_LABEL: "another"}}})
    assert edited["spec"]["selector"][NAME_LABEL] == "another"
    # Once a fresh edit is reverted, the new leader has processed its first list.
    eventually(
        "the new leader reverts an edit",
        lambda: (child_object(kube, llm, "services") or {})["spec"]["selector"][NAME_LABEL] == llm.name,
    )

    new = operator.write_record.writes() - written
    others = {
        what: n
        for what, n in new.items()
        if not what.startswith(("leases ", f"services {llm.namespace}/{llm.name} "))
    }
    assert json.dumps(others) == "{}"
    assert {pod["metadata"]["uid"]: restart_count(pod) for pod in llm.pods()} == pods
    del versions["services", llm.name]
    assert versions.items() <= resource_versions(kube, llm).items()


def resource_versions(kube: Kubectl, llm: LLMDeployment) -> dict[tuple[str, str], str]:
    """The resourceVersion of the LLMDeployment and of each object that it owns."""
    children = [
        (kind, each)
        for kind in CHILDREN
        for each in kube.list(kind, llm.namespace, f"{NAME_LABEL}={llm.name}")
    ]
    return {
        (kind, each["metadata"]["name"]): each["metadata"]["resourceVersion"]
        for kind, each in [("llmdeployments", llm.read()), *children]
    }


def restart_count(pod: Manifest) -> int:
    return sum(c["restartCount"] for c in pod["status"]["containerStatuses"])
