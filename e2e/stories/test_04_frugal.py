"""Story: one LLMDeployment with the settings of a busy replica with little memory: priorities, a bounded
queue, a small int8 KV cache that swaps to host memory, and an engine that is killed.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from e2e.kubectl import Kubectl
from e2e.stories.deployment import SERVED_NAME, LLMDeployment, small_spec
from e2e.stories.waiting import eventually

ENGINE = {
    "maxModelLen": 1024,
    "maxNumSeqs": 1,
    "quantization": "Int8",
    "schedulingPolicy": "Priority",
    "maxQueuedTokens": 400,
    # The cache holds one sequence of maxModelLen and little more.
    "kvCache": {"memory": "14Mi", "dtype": "Int8", "hostOffload": "64Mi", "preemptionMode": "Swap"},
}
# Run inside the pod: sends SIGKILL to the engine process and prints its pid.
KILL_THE_ENGINE = """
import os, pathlib, signal
for process in pathlib.Path("/proc").iterdir():
    if process.name.isdigit() and b"quire_server.engine" in (process / "cmdline").read_bytes().split(b"\\0"):
        os.kill(int(process.name), signal.SIGKILL)
        print(process.name)
"""


@pytest.fixture(scope="module")
def llm(kube: Kubectl, namespace: str) -> Iterator[LLMDeployment]:
    llm = LLMDeployment(kube, namespace, "frugal")
    llm.apply(small_spec(engine=ENGINE))
    llm.wait_ready()
    yield llm
    llm.remove()


def complete(llm: LLMDeployment, prompt: str, max_tokens: int, priority: str = "normal") -> Any:
    with llm.client() as client:
        return client.completions.create(
            model=SERVED_NAME,
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0,
            extra_body={"priority": priority, "ignore_eos": True},
        )


def metric(llm: LLMDeployment, name: str, **labels: str) -> float:
    """One sample of /metrics, read through the Service."""
    with urllib.request.urlopen(llm.base_url.removesuffix("/v1") + "/metrics", timeout=10) as answer:
        text = answer.read().decode()
    (value,) = (
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )
    return float(value)


def answer_about_france(llm: LLMDeployment) -> str:
    with llm.client() as client:
        answer = client.chat.completions.create(
            model=SERVED_NAME,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            max_tokens=16,
            temperature=0,
        )
    return answer.choices[0].message.content or ""


def test_the_answer_is_right(llm: LLMDeployment) -> None:
    assert "Paris" in answer_about_france(llm)


@pytest.mark.deep
def test_a_high_priority_request_preempts_and_too_many_queued_tokens_are_refused(
    llm: LLMDeployment,
) -> None:
    undisturbed = complete(llm, "Once upon a time", 200, "low").choices[0].text
    before = metric(llm, "llm_swapped_requests_total")
    ended: list[str] = []

    def ask(name: str, prompt: str, max_tokens: int, priority: str) -> str:
        text: str = complete(llm, prompt, max_tokens, priority).choices[0].text
        ended.append(name)
        return text

    with ThreadPoolExecutor(3) as clients:
        running = clients.submit(ask, "running", "Once upon a time", 200, "low")
        eventually("it runs", lambda: metric(llm, "llm_running_requests") == 1, poll=0.05)
        waiting = [
            clients.submit(ask, f"waiting {word}", f"{word} " * 150, 4, "low") for word in ("day", "sun")
        ]
        eventually("two wait", lambda: metric(llm, "llm_active_requests") == 3, poll=0.05)
        with pytest.raises(openai.InternalServerError) as refused:
            complete(llm, "night " * 300, 4)
        ask("urgent", "The sky is", 4, "high")
        assert ended == ["urgent"]
        assert running.result() == undisturbed, "preemption changed the answer"
        assert all(one.result() for one in waiting)

    assert refused.value.status_code == 503
    assert json.loads(refused.value.response.text)["error"]["code"] == "queue_full"
    assert metric(llm, "llm_swapped_requests_total") > before, (
        "the preempted request was not swapped to the host"
    )


@pytest.mark.deep
def test_evicted_kv_blocks_are_loaded_back_from_the_host(llm: LLMDeployment) -> None:
    stories = [f"{word} " * 700 for word in ("red", "green", "blue")]
    first = complete(llm, stories[0], 4)
    for story in stories[1:]:  # each needs most of the cache, so it evicts the one before
        complete(llm, story, 4)
    loaded = metric(llm, "llm_kv_tier_loaded_blocks_total", tier="host")

    again = complete(llm, stories[0], 4)

    assert metric(llm, "llm_kv_tier_used_blocks", tier="host") > 0
    assert metric(llm, "llm_kv_tier_loaded_blocks_total", tier="host") > loaded
    assert again.usage.prompt_tokens_details.cached_tokens > 600
    assert again.choices[0].text == first.choices[0].text


def test_a_killed_engine_is_reported_and_the_container_restarts(llm: LLMDeployment, kube: Kubectl) -> None:
    (pod,) = llm.pods()
    name, before = pod["metadata"]["name"], answer_about_france(llm)

    killed = kube.run("exec", "-n", llm.namespace, name, "--", "python", "-c", KILL_THE_ENGINE)
    assert killed.split(), "no engine was found in the pod"
    failure = llm.wait_failure("EngineCrashed")

    eventually("the pod serves again", lambda: llm.endpoints() == {name})
    llm.wait_ready()
    (pod,) = llm.pods()
    assert pod["metadata"]["name"] == name
    assert [container["restartCount"] for container in pod["status"]["containerStatuses"]] == [1]
    assert (failure["pod"], failure["exitCode"]) == (name, 137)
    assert answer_about_france(llm) == before
