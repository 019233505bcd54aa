"""Story: `disaggregation` gives long prompts a pod of their own. Answers are the same with it, and without it
when it goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from prometheus_client.parser import text_string_to_metric_families

from e2e.kubectl import Kubectl, Manifest
from e2e.stories.deployment import NAME_LABEL, SERVED_NAME, LLMDeployment, is_ready, small_spec
from e2e.stories.waiting import eventually

pytestmark = pytest.mark.alone  # it lets no pod start for a while

#: In float32 no choice between two tokens depends on which pod computed the prompt.
EXACT = {**small_spec()["engine"], "dtype": "Float32", "quantization": "None"}
LONG = 128  # tokens
ROLES = {"prefill": {"replicas": 1}, "localPrefillBelowTokens": LONG}
FACTS = " ".join(f"City number {n} lies {7 * n} kilometres from the sea." for n in range(1, 25))
# Run inside a pod: no NetworkPolicy lets clients reach a prefill pod.
READ_METRICS = """
import urllib.request
print(urllib.request.urlopen("http://127.0.0.1:8000/metrics").read().decode())
"""


def ask(llm: LLMDeployment, topic: str) -> str:
    """A greedy answer to a long prompt. Each topic makes another one, of which nothing is cached."""
    question = f"These are notes about {topic}. {FACTS} What is the capital of France?"
    with llm.client() as client:
        answer = client.chat.completions.create(
            model=SERVED_NAME,
            messages=[
                {"role": "system", "content": f"You know {topic}."},
                {"role": "user", "content": question},
            ],
            temperature=0,
            max_tokens=24,
        )
    assert answer.usage is not None and answer.usage.prompt_tokens > 2 * LONG
    return answer.choices[0].message.content or ""


def pods_of(kube: Kubectl, llm: LLMDeployment, role: str) -> list[Manifest]:
    """The ready pods of a role: leader for decode pods, or prefill."""
    pods = kube.list("pods", llm.namespace, f"{NAME_LABEL}={llm.name},serving.quire.dev/role={role}")
    return [pod for pod in pods if is_ready(pod) and "deletionTimestamp" not in pod["metadata"]]


def metric(kube: Kubectl, pod: Manifest, name: str) -> float:
    """One sample of the pod's /metrics."""
    about = pod["metadata"]
    text = kube.run("exec", "-n", about["namespace"], about["name"], "--", "python", "-c", READ_METRICS)
    (value,) = (
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    )
    return float(value)


@contextmanager
def deleted_without_a_place_for_another(kube: Kubectl, pod: Manifest) -> Iterator[None]:
    """The pod is gone, and the next one waits for a node until the end of the block."""
    about, node = pod["metadata"], pod["spec"]["nodeName"]
    kube.run("cordon", node)
    try:
        kube.run("delete", "pod", about["name"], "-n", about["namespace"], "--now")
        yield
    finally:
        kube.run("uncordon", node)


def transfers(kube: Kubectl, llm: LLMDeployment) -> tuple[float, float]:
    """Prompts that the decode pod got from a prefill pod, and those that it computed itself instead."""
    (decode,) = pods_of(kube, llm, "leader")
    return (
        metric(kube, decode, "llm_kv_transfers_total"),
        metric(kube, decode, "llm_kv_transfer_failures_total"),
    )


def test_a_prefill_pod_computes_long_prompts_and_when_it_goes_no_answer_is_another(
    kube: Kubectl, deploy: Callable[..., LLMDeployment]
) -> None:
    llm = deploy("apart", engine=EXACT)
    llm.wait_ready()
    expected = {topic: ask(llm, topic) for topic in ("harbours", "bridges")}
    assert all("Paris" in answer for answer in expected.values())

    llm.patch({"disaggregation": ROLES})
    llm.wait_settled()
    llm.wait_reason("TransferDegraded", "AsExpected")
    roles = {role["name"]: role for role in llm.status()["roles"]}
    assert [roles[name]["readyReplicas"] for name in ("decode", "prefill")] == [1, 1]
    assert llm.endpoints() == {pod["metadata"]["name"] for pod in pods_of(kube, llm, "leader")}

    assert ask(llm, "harbours") == expected["harbours"]
    assert transfers(kube, llm) == (1, 0)
    (prefill,) = pods_of(kube, llm, "prefill")
    eventually("no block is held", lambda: metric(kube, prefill, "llm_kv_transfer_held") == 0)

    with deleted_without_a_place_for_another(kube, prefill):
        assert ask(llm, "bridges") == expected["bridges"]
        assert transfers(kube, llm) == (1, 1)
        llm.wait_reason("TransferDegraded", "TransferDegraded")
        assert llm.condition("Ready")["status"] == "True"
        eventually("its Event", lambda: llm.events("TransferDegraded"))


@pytest.mark.deep
def test_transfers_are_as_expected_again_with_the_first_that_succeeds(
    kube: Kubectl, deploy: Callable[..., LLMDeployment]
) -> None:
    llm = deploy("again", engine=EXACT, disaggregation=ROLES)
    llm.wait_ready()
    llm.wait_reason("TransferDegraded", "AsExpected")
    (prefill,) = pods_of(kube, llm, "prefill")
    topics = (f"river {number}" for number in range(1000))
    with deleted_without_a_place_for_another(kube, prefill):
        ask(llm, next(topics))
        llm.wait_reason("TransferDegraded", "TransferDegraded")

    def succeeds() -> bool:
        ask(llm, next(topics))
        return transfers(kube, llm)[0] > 0

    eventually("a prompt comes from the new prefill pod", succeeds, poll=2.0)
    llm.wait_reason("TransferDegraded", "AsExpected")
