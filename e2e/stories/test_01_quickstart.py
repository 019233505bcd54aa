"""Story: apply the example, wait for Ready, send a question."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml

from e2e.kubectl import Kubectl
from e2e.stories.deployment import SERVED_NAME, LLMDeployment
from e2e.stories.load import stream_text

EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2.yaml"
QUESTION = "What is the capital of France?"


def test_the_example_becomes_ready_and_answers_with_the_capital_of_france(
    kube: Kubectl, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = yaml.safe_load(EXAMPLE.read_text())
    manifest["metadata"]["namespace"] = namespace
    llm = LLMDeployment(kube, namespace, manifest["metadata"]["name"])

    applied = time.monotonic()
    kube.apply(manifest)
    llm.wait_ready()
    ready = time.monotonic()
    with llm.client() as client:
        stream = client.chat.completions.create(
            model=SERVED_NAME,
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
            max_tokens=32,
            stream=True,
        )
        next(chunk for chunk in stream if chunk.choices and chunk.choices[0].delta.content)
        first_token = time.monotonic()
        stream.close()

        answer = client.chat.completions.create(
            model=SERVED_NAME, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=32
        )
        text = answer.choices[0].message.content or ""
        streamed = stream_text(client, SERVED_NAME, QUESTION, max_tokens=32)
    with capsys.disabled():
        print(
            f"\n  apply -> Ready {ready - applied:.1f} s -> first token {first_token - applied:.1f} s"
            f"   (loading took {llm.status().get('model', {}).get('lastLoadSeconds')} s)"
        )

    assert "Paris" in text
    assert streamed == text
    kube.delete("llmdeployment", llm.name, namespace)


def test_kubectl_get_shows_phase_replicas_and_the_reason(kube: Kubectl, namespace: str) -> None:
    manifest = yaml.safe_load(EXAMPLE.read_text())
    manifest["metadata"]["namespace"] = namespace
    llm = LLMDeployment(kube, namespace, manifest["metadata"]["name"])
    kube.apply(manifest)
    llm.wait_ready()

    header, row = kube.run("get", "llmdep", "-n", namespace).splitlines()

    assert header.split() == ["NAME", "PHASE", "READY", "DESIRED", "REASON", "CONTEXT", "AGE"]
    assert row.split()[:5] == [llm.name, "Serving", "1", "1", "AllReplicasReady"]
    kube.delete("llmdeployment", llm.name, namespace)
