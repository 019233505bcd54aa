"""Story: a LoRA adapter is given to a model that serves, a broken one is named, and one is taken away;
the same pod answers all the time.
"""

from __future__ import annotations

import array
import json
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from e2e.kubectl import Manifest
from e2e.stories.deployment import SERVED_NAME, LLMDeployment, small_spec
from e2e.stories.waiting import eventually
from e2e.up.place import Place
from e2e.up.volume import Volumes

CLAIM = "adapters"
RANK = 4
# The kubelet brings a changed ConfigMap into a pod within its sync period and the time of its cache.
SYNC_SECONDS = 240


def write_adapter(directory: Path, model: Path) -> None:
    """An adapter of random numbers for the query projections, in PEFT's layout."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    width, numbers = config["hidden_size"], random.Random(1)
    header: dict[str, object] = {}
    data = array.array("f")
    for layer in range(config["num_hidden_layers"]):
        for factor, shape in (("lora_A", (RANK, width)), ("lora_B", (width, RANK))):
            start = 4 * len(data)
            data.extend(numbers.gauss(0, 0.2) for _ in range(RANK * width))
            name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.{factor}.weight"
            header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, 4 * len(data)]}
    text = json.dumps(header).encode()
    directory.mkdir(parents=True)
    (directory / "adapter_model.safetensors").write_bytes(
        struct.pack("<Q", len(text)) + text + data.tobytes()
    )
    document = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(document), encoding="utf-8")


@pytest.fixture
def claim(namespace: str, volumes: Volumes, place: Place, tmp_path: Path) -> Iterator[str]:
    """A claim with the adapters `first` and `second`."""
    for name in ("first", "second"):
        write_adapter(tmp_path / "story-adapters" / name, place.model)
    volumes.provide(tmp_path / "story-adapters", namespace, CLAIM)
    yield CLAIM
    volumes.remove(namespace, CLAIM)


def adapter(name: str, path: str = "") -> Manifest:
    return {"name": name, "source": {"pvc": {"claimName": CLAIM, "path": path or name}}}


def answer(llm: LLMDeployment, model: str) -> str:
    with llm.client() as client:
        made = client.completions.create(
            model=model,
            prompt="Once upon a time",
            max_tokens=8,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
    return str(made.choices[0].text)


def states(llm: LLMDeployment) -> dict[str, str]:
    return {entry["name"]: entry["state"] for entry in llm.status().get("adapters", [])}


@pytest.mark.deep
def test_an_adapter_is_given_to_a_model_that_serves_and_taken_away_and_its_pod_stays(
    claim: str, deploy: Callable[..., LLMDeployment]
) -> None:
    engine = {**small_spec()["engine"], "maxAdapters": 2}
    llm = deploy("adapted", engine=engine, adapters=[adapter("first")])
    llm.wait_ready()
    llm.wait_reason("AdaptersReady", "AllAdaptersReady")
    before = {pod["metadata"]["uid"] for pod in llm.pods()}
    plain = answer(llm, SERVED_NAME)
    assert answer(llm, "first") != plain

    llm.patch({"adapters": [adapter("first"), adapter("second"), adapter("broken", "nowhere")]})
    eventually(
        "the second adapter is ready, and the broken one is named",
        lambda: states(llm) == {"first": "Ready", "second": "Ready", "broken": "Failed"},
        timeout=SYNC_SECONDS,
        poll=1.0,
    )
    assert answer(llm, "second") == answer(llm, "first"), "they have the same files"
    failed = llm.wait_reason("AdaptersReady", "AdapterFailed")
    assert "broken" in failed["message"]
    eventually("its Event", lambda: llm.events("AdapterFailed"))
    assert llm.condition("Ready")["status"] == "True"

    # "first" stays: without any adapter of the claim the pod would be replaced by one that does not mount it.
    llm.patch({"adapters": [adapter("first")]})

    def is_gone() -> bool:
        try:
            answer(llm, "second")
        except openai.NotFoundError:
            return True
        return False

    eventually("the second adapter is gone", is_gone, timeout=SYNC_SECONDS, poll=1.0)
    llm.wait_reason("AdaptersReady", "AllAdaptersReady")
    assert states(llm) == {"first": "Ready"}
    assert answer(llm, SERVED_NAME) == plain
    assert {pod["metadata"]["uid"] for pod in llm.pods()} == before
    (pod,) = llm.pods()
    statuses = (*pod["status"]["containerStatuses"], *pod["status"]["initContainerStatuses"])
    assert [one["restartCount"] for one in statuses] == [0, 0]
