"""Story: a pod is deleted in mid-stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from openai import OpenAI
from openai.types.chat import ChatCompletionChunk

from e2e.kubectl import Kubectl
from e2e.stories.deployment import SERVED_NAME, LLMDeployment
from e2e.stories.waiting import eventually

DRAIN = {"preStopSeconds": 3, "timeoutSeconds": 120}


def started_stream(client: OpenAI) -> Iterator[ChatCompletionChunk]:
    """The chunks of a long stream after its first one."""
    stream = client.chat.completions.create(
        model=SERVED_NAME,
        messages=[{"role": "user", "content": "Tell me a long story."}],
        max_tokens=300,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    chunks = iter(stream)
    next(chunks)
    return chunks


def finish_reason(chunks: Iterator[ChatCompletionChunk]) -> str | None:
    return [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1]


def test_a_deleted_pod_finishes_its_stream_while_new_requests_go_elsewhere(
    kube: Kubectl, deploy: Callable[..., LLMDeployment]
) -> None:
    llm = deploy("drain", replicas=1, drain=DRAIN)
    llm.wait_ready()
    (pod,) = llm.pods()
    name = pod["metadata"]["name"]

    with llm.client() as held, llm.client() as fresh:
        chunks = started_stream(held)
        kube.delete("pod", name, llm.namespace, "--wait=false")
        eventually("the pod left the Service", lambda: name not in llm.endpoints())
        llm.patch({"replicas": 1})
        eventually("another pod serves", lambda: llm.endpoints() - {name})
        llm.wait_routed()
        answer = fresh.chat.completions.create(
            model=SERVED_NAME, messages=[{"role": "user", "content": "Hi"}], max_tokens=8
        )
        finish = finish_reason(chunks)

    assert answer.choices[0].finish_reason in {"stop", "length"}
    assert finish == "length", "the stream of the deleted pod did not run to its end"
    eventually("the deleted pod is gone", lambda: kube.get("pods", name, llm.namespace) is None)
