"""Story: `parallelism.tensor` divides a model among three processes, and its answers stay the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from e2e.kubectl import Kubectl
from e2e.stories.deployment import SERVED_NAME, LLMDeployment, small_spec

pytestmark = pytest.mark.alone  # its pod asks for most of the node's CPUs

# Enough for three processes, on a node of two CPUs.
RESOURCES = {"cpu": "1500m", "memory": "3Gi"}
#: In float32 parts that are added up in another order change no choice between two tokens.
EXACT = {**small_spec()["engine"], "dtype": "Float32", "quantization": "None"}
# Run inside the pod: prints how many processes compute.
COUNT_THE_RANKS = """
import pathlib
computes = {b"quire_server.engine", b"quire_server.engine.rank"}
commands = [path.read_bytes().split(b"\\0") for path in pathlib.Path("/proc").glob("[0-9]*/cmdline")]
print(sum(not computes.isdisjoint(command) for command in commands))
"""
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours of the rainbow.",
    "Write one sentence about the sea.",
)


def answers(llm: LLMDeployment) -> list[str]:
    """Greedy answers, one after the other."""
    with llm.client() as client:
        return [
            client.chat.completions.create(
                model=SERVED_NAME,
                messages=[{"role": "user", "content": question}],
                temperature=0,
                max_tokens=48,
            )
            .choices[0]
            .message.content
            or ""
            for question in QUESTIONS
        ]


def num_processes(kube: Kubectl, llm: LLMDeployment) -> int:
    """How many processes compute in its only pod."""
    (pod,) = llm.ready_pods()
    name = pod["metadata"]["name"]
    return int(kube.run("exec", "-n", llm.namespace, name, "--", "python", "-c", COUNT_THE_RANKS))


@pytest.mark.deep
def test_three_ranks_answer_as_one_and_a_size_that_does_not_divide_says_which_do(
    kube: Kubectl, deploy: Callable[..., LLMDeployment]
) -> None:
    llm = deploy("ranks", engine=EXACT, resources=RESOURCES, rollout={"strategy": "InPlace"})
    llm.wait_ready()
    expected = answers(llm)
    assert "Paris" in expected[0]
    assert num_processes(kube, llm) == 1

    llm.patch({"parallelism": {"tensor": 3}})
    llm.wait_settled()

    assert num_processes(kube, llm) == 3
    assert answers(llm) == expected

    llm.patch({"parallelism": {"tensor": 2}})
    failure = llm.wait_failure("ConfigError")
    assert "cannot be divided among 2 ranks" in failure["message"]
    assert "one of 1, 3" in failure["message"]
