"""The figures of docs/parallelism.md are those of the server: what its ranks exchange, and its example."""

import json
from functools import partial
from pathlib import Path

import pytest
import yaml

from docs import parallelism_tables
from e2e import models
from e2e.api import specs
from quire_operator import spec
from quire_sizing import memory
from quire_sizing.model import from_config, rank_parameters, rank_vocab
from tests.server.models import families
from tests.server.models.lockstep import ThreadRanks
from tests.server.models.test_sharding import PROMPT, forward, shards

PAGE = parallelism_tables.page()


@pytest.mark.parametrize("size", [2, 4])
def test_a_step_exchanges_as_many_bytes_as_the_formula_says(tmp_path: Path, size: int) -> None:
    families.build(tmp_path, "Llama", {})
    model = from_config(json.loads((tmp_path / "config.json").read_text()))
    ranks = ThreadRanks(size)

    ranks.run([partial(forward, shard, PROMPT) for shard in shards(tmp_path, ranks)])

    sums = [count for kind, count in ranks.calls if kind == "all_reduce"]
    gathers = [count for kind, count in ranks.calls if kind == "gather"]
    assert len(sums) == memory.exchanges(model.num_layers)
    assert sum(sums) == memory.exchanged_bytes(model, len(PROMPT), bits=32)
    assert gathers == [len(PROMPT) * rank_vocab(model, size) * 4]


def test_the_page_has_the_model_of_the_example_as_it_is() -> None:
    document = json.loads((models.smollm2() / "config.json").read_text())
    known = parallelism_tables.MODELS["SmolLM2 135M"]

    assert from_config(document) == known
    assert "| SmolLM2 135M | 9 | 3 | 1, 3 |" in PAGE
    third = memory.weight_bytes(rank_parameters(known, 3)) / 1e9
    assert f"| SmolLM2 135M | 3 | {third:.2f} GB |" in PAGE
    assert "| SmolLM2 135M | 61 | 0.07 MB |" in PAGE
    assert "| SmolLM2 135M | 30 | 8.0 layers | 19 + 11 | 13 + 12 + 5 |" in PAGE


def test_the_longest_sum_is_where_both_ways_of_dividing_give_as_many_tokens() -> None:
    model, bandwidth, devices = parallelism_tables.MODELS["Llama 3.1 8B"], 3.35e12, 2
    weights = memory.weight_bytes(model.parameters)

    sum_ = memory.longest_sum(model, devices, bandwidth, weights)

    shared = weights / devices / bandwidth + memory.exchanges(model.num_layers) * sum_
    assert shared == pytest.approx(weights / bandwidth)  # as long as all stages take together
    assert f"| GPUs that read 3.35 TB/s each | {sum_ * 1e6:.0f} µs |" in PAGE


@pytest.mark.parametrize(
    ("example", "model", "written"),
    [
        ("smollm2-tensor-parallel.yaml", "SmolLM2 135M", "{tensor: 3}"),
        (
            "smollm2-two-nodes.yaml",
            "SmolLM2 135M",
            "{tensor: 3, pipeline: 2, nodes: 2, authSecretRef: {name: smollm2-ranks}}",
        ),
        (
            "two-nodes-gpus.yaml",
            "Llama 3.1 70B",
            "{tensor: 8, pipeline: 2, nodes: 2, authSecretRef: {name: llama-70b-ranks}}",
        ),
    ],
)
def test_an_example_is_valid_and_divides_its_model(example: str, model: str, written: str) -> None:
    body = yaml.safe_load((specs.ROOT / "examples" / example).read_text())

    tensor = spec.parse(body).spec.parallelism.tensor

    assert tensor in parallelism_tables.sizes_of(parallelism_tables.MODELS[model])
    assert body["spec"]["parallelism"] == yaml.safe_load(written)
    assert f"parallelism: {written}" in PAGE
    assert f"examples/{example}" in PAGE


def test_the_largest_size_of_the_page_is_that_of_the_api() -> None:
    tensor = specs.SPEC_SCHEMA["properties"]["parallelism"]["properties"]["tensor"]
    assert tensor["maximum"] == parallelism_tables.MOST
