"""Story: edit the spec; the rolling update completes or is rolled back, and no stream breaks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from e2e.stories.deployment import SERVED_NAME, LLMDeployment
from e2e.stories.load import StreamLoad
from e2e.stories.waiting import eventually


def test_a_rolling_update_breaks_no_stream(deploy: Callable[..., LLMDeployment]) -> None:
    llm = deploy("change")
    llm.wait_ready()
    before = {pod["metadata"]["uid"] for pod in llm.pods()}

    with StreamLoad(llm.base_url, SERVED_NAME) as load:
        llm.patch({"engine": {"maxNumSeqs": 4}})
        llm.wait_settled()
        after = {pod["metadata"]["uid"] for pod in llm.pods()}
        load.wait_for_more(4)

    assert before.isdisjoint(after), "the edit did not roll the pods"
    assert load.broken == []


@pytest.mark.deep
def test_a_new_restart_id_replaces_the_pods_and_paused_delays_a_change(
    deploy: Callable[..., LLMDeployment],
) -> None:
    llm = deploy("restart")
    llm.wait_ready()
    first = {pod["metadata"]["uid"] for pod in llm.pods()}

    llm.patch({"rollout": {"restartId": "once", "paused": True}})
    llm.wait_reason("RolloutComplete", "Paused")
    held = {pod["metadata"]["uid"] for pod in llm.pods()}
    llm.patch({"rollout": {"paused": False}})
    llm.wait_settled()
    second = {pod["metadata"]["uid"] for pod in llm.pods()}

    assert held == first
    assert second.isdisjoint(first)


@pytest.mark.deep
def test_a_failed_rollout_is_rolled_back_and_the_next_edit_is_rolled_out(
    deploy: Callable[..., LLMDeployment],
) -> None:
    llm = deploy("back", rollout={"autoRollback": True})
    llm.wait_ready()
    good = llm.status()["renderRevision"]
    before = {pod["metadata"]["uid"] for pod in llm.pods()}

    with StreamLoad(llm.base_url, SERVED_NAME) as load:
        llm.patch({"model": {"source": {"pvc": {"path": "nowhere"}}}})
        ready = llm.wait_reason("Ready", "RolledBack")
        eventually(
            "only the old pods are left",
            lambda: {pod["metadata"]["uid"] for pod in llm.pods()} == before,
            timeout=120,
        )
        load.wait_for_more(2)

    assert "ModelNotFound" in ready["message"]
    assert load.broken == []
    eventually("the status has the old revision", lambda: llm.status()["renderRevision"] == good)
    assert llm.read()["spec"]["model"]["source"]["pvc"]["path"] == "nowhere", (
        "a rollback must not edit the spec"
    )
    assert len(llm.events("RolledBack")) == 1

    llm.patch({"model": {"source": {"pvc": {"path": None}}}, "engine": {"maxNumSeqs": 4}})
    llm.wait_settled()
    assert before.isdisjoint({pod["metadata"]["uid"] for pod in llm.pods()})
