"""Story: engines that are stuck, slow, stalled or wrong are distinguished and handled accordingly."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from e2e.kubectl import Manifest
from e2e.stories.deployment import SERVED_NAME, LLMDeployment
from e2e.stories.waiting import eventually


def engine_with_fault(text: str) -> Manifest:
    return {
        "maxModelLen": 1024,
        "maxNumSeqs": 8,
        "kvCache": {"memory": "128Mi"},
        "env": [{"name": "QUIRE_FAULT", "value": text}],
    }


def send_in_background(llm: LLMDeployment) -> threading.Thread:
    """Sends one request that keeps the engine busy and may fail; the thread that waits for it."""

    def ask() -> None:
        with llm.client() as client:
            try:
                client.completions.create(
                    model=SERVED_NAME,
                    prompt="Once upon a time",
                    max_tokens=200,
                    extra_body={
                        "ignore_eos": True
                    },  # the answer must not end before the step that gets stuck
                )
            except Exception as error:  # the engine is killed while it runs
                print(f"the request ended with {type(error).__name__}, as it may")

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return thread


@pytest.mark.deep
def test_a_stuck_engine_leaves_the_service_and_is_restarted(deploy: Callable[..., LLMDeployment]) -> None:
    llm = deploy(
        "stuck",
        engine=engine_with_fault("stuck_step:after=40,once"),
        health={"stallTimeoutSeconds": 10},
    )
    llm.wait_ready()
    (pod,) = llm.pods()

    asked = send_in_background(llm)
    llm.wait_fault("stuck_step")
    eventually("the stuck pod left the Service", lambda: not llm.endpoints())
    failure = llm.wait_failure("EngineStalled")
    eventually(
        "the restarted pod serves again", lambda: llm.endpoints() == {pod["metadata"]["name"]}, timeout=120
    )
    asked.join(timeout=60)

    assert failure["pod"] == pod["metadata"]["name"]
    assert failure["message"]
    llm.wait_ready()
    assert len(llm.events("EngineStalled")) == 1


@pytest.mark.deep
def test_a_slow_load_is_not_restarted_and_reports_its_progress(deploy: Callable[..., LLMDeployment]) -> None:
    llm = deploy(
        "slow", engine=engine_with_fault("slow_load:after=3"), health={"loadStallTimeoutSeconds": 10}
    )

    llm.wait_fault("slow_load")
    progress = eventually(
        "the status shows a part of the model loaded",
        lambda: (m := llm.status().get("model", {})) and 0 < m.get("bytesLoaded", 0) < m["bytesTotal"] and m,
        timeout=60,
    )
    llm.wait_ready()

    assert progress["bytesTotal"] > 100_000_000
    assert all(c["restartCount"] == 0 for pod in llm.pods() for c in pod["status"]["containerStatuses"])


@pytest.mark.deep
def test_a_stalled_load_is_ended_and_reported(deploy: Callable[..., LLMDeployment]) -> None:
    llm = deploy(
        "stalled",
        engine=engine_with_fault("stalled_load:after=0,once"),
        health={"loadStallTimeoutSeconds": 5},
    )

    llm.wait_fault("stalled_load")
    failure = llm.wait_failure("LoadStalled")
    llm.wait_ready()

    assert failure["exitCode"] != 0
    assert "loadStallTimeoutSeconds" in failure["message"]


@pytest.mark.deep
def test_a_canary_that_stays_wrong_removes_the_pod_from_the_service_and_restarts_it(
    deploy: Callable[..., LLMDeployment],
) -> None:
    llm = deploy(
        "canary", engine=engine_with_fault("wrong_canary:after=1"), health={"canaryIntervalSeconds": 5}
    )
    eventually("the pod serves at first", lambda: llm.endpoints())

    llm.wait_fault("wrong_canary")
    eventually("the pod left the Service", lambda: not llm.endpoints())
    ready = llm.wait_reason("Ready", "CanaryMismatch")

    assert ready["status"] == "False"
    eventually(
        "it restarted by itself",
        lambda: [s["restartCount"] for pod in llm.pods() for s in pod["status"]["containerStatuses"]] != [0],
        timeout=60,
    )
    assert llm.wait_failure("CanaryMismatch")["message"]
