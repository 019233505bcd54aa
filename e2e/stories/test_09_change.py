"""Story: edit the spec; the rolling update completes and no stream breaks."""

from __future__ import annotations

from collections.abc import Callable

from e2e.stories.deployment import SERVED_NAME, LLMDeployment
from e2e.stories.load import StreamLoad


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
