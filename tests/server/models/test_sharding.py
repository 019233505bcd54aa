"""A model that is divided among ranks computes what the whole model computes, in every family and format."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire_server.core.step import StartedRow, Step
from quire_server.core.sampling_params import SamplingParams
from quire_server.core.topology import Topology
from quire_server.errors import ConfigError
from quire_server.layers.linear import Linear
from quire_server.models import registry, sharding, weights
from quire_server.models.config import ModelConfig
from quire_server.models.decoder import Decoder
from quire_server.runner import batch_builder, kv_cache
from quire_server.runner.batch_builder import StepLayout
from quire_server.runner.input_batch import InputBatch
from quire_server.runner.loader import Checkpoint
from tests.server.models import families
from tests.server.models.lockstep import ThreadRanks
from tests.server.models.variants import SIZES, VARIANTS, VOCAB

PROMPT = tuple(families.PROMPTS[0])
CPU = torch.device("cpu")


def forward(model: Decoder, prompt: tuple[int, ...]) -> Tensor:
    """The logits at every position of a prompt."""
    config = model.config
    batch = InputBatch(1, 64, 16)
    blocks = -(-len(prompt) // 16)
    row = StartedRow(0, "a", prompt, len(prompt), tuple(range(blocks)), SamplingParams(1), 0)
    step = Step(0, (row,), (), (0,), (0,), (len(prompt),), (1,))
    batch.apply(step)
    caches = kv_cache.allocate(config, blocks, 16, dtype=torch.float32, device=CPU)
    built = batch_builder.build(step, StepLayout.of(step), batch, config.num_kv_heads, config.windows)
    with torch.inference_mode():
        return model.logits(model.states(built, caches), torch.arange(len(prompt)))


def shards(directory: Path, ranks: ThreadRanks) -> list[Decoder]:
    checkpoint = Checkpoint.open(directory, dtype="float32", quantization_name="none")
    return [
        checkpoint.read_shard(Topology(ranks.size, rank), communicator, max_len=256, device=CPU)
        for rank, communicator in enumerate(ranks.communicators)
    ]


def divided(variant: str) -> list[int]:
    prefix, settings = VARIANTS[variant]
    document = families.config(prefix, settings).to_dict() | {"architectures": [f"{prefix}ForCausalLM"]}
    heads, kv_heads = SIZES["num_attention_heads"], document["num_key_value_heads"]
    experts = document.get("num_local_experts") or document.get("num_experts") or heads
    return [size for size in (2, 4) if not experts % size and (not kv_heads % size or not size % kv_heads)]


@pytest.mark.parametrize(
    ("variant", "size"), [(variant, size) for variant in VARIANTS for size in divided(variant)]
)
def test_ranks_together_compute_the_logits_of_the_whole_model(
    tmp_path: Path, variant: str, size: int
) -> None:
    families.make(tmp_path, variant)
    checkpoint = Checkpoint.open(tmp_path, dtype="float32", quantization_name="none")
    whole = checkpoint.read(max_len=256, device=CPU, on_progress=lambda *_: None)
    expected = forward(whole, PROMPT)
    ranks = ThreadRanks(size)
    results = ranks.run([partial(forward, model, PROMPT) for model in shards(tmp_path, ranks)])
    torch.testing.assert_close(results[0], expected, atol=2e-4, rtol=1e-3)
    assert [call for call, _ in ranks.calls] == ["all_reduce"] * (2 * whole.config.num_layers + 1) + ["gather"]
