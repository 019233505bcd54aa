"""A model that is divided among ranks computes what the whole model computes, in every family and format."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from e2e import models
from quire_kernels.quantization.w4a16_packing import w4_dequantize
from quire_server.core.sampling_params import SamplingParams
from quire_server.core.step import StartedRow, Step
from quire_server.core.topology import Topology
from quire_server.errors import ConfigError, ModelCorruptError
from quire_server.layers.parallel import SingleRank
from quire_server.layers.quantized.gptq import GPTQ
from quire_server.layers.quantized.int4 import StoredInt4
from quire_server.model_dir.files import write_manifest
from quire_server.models import registry
from quire_server.models.decoder import Decoder
from quire_server.runner import batch_builder, kv_cache
from quire_server.runner.batch_builder import StepLayout
from quire_server.runner.input_batch import InputBatch
from quire_server.runner.loader import Checkpoint
from tests.server.models import families, quantized_directories, quantized_matrix
from tests.server.models.lockstep import ThreadRanks
from tests.server.models.variants import SIZES, VARIANTS

PROMPT = tuple(families.PROMPTS[0])
CPU = torch.device("cpu")


def forward(model: Decoder, prompt: tuple[int, ...]) -> Tensor:
    """The logits at every position of a prompt."""
    states = forward_states(model, prompt)
    with torch.inference_mode():
        return model.logits(states, torch.arange(len(prompt)))


def forward_states(model: Decoder, prompt: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The states at every position of a prompt."""
    config = model.config
    batch = InputBatch(1, 64, 16)
    blocks = -(-len(prompt) // 16)
    row = StartedRow(0, "a", prompt, len(prompt), tuple(range(blocks)), SamplingParams(1), 0)
    step = Step(0, (row,), (), (0,), (0,), (len(prompt),), (1,))
    batch.apply(step)
    caches = kv_cache.allocate(config, blocks, 16, dtype=torch.float32, device=CPU)
    built = batch_builder.build(step, StepLayout.of(step), batch, config.num_kv_heads, config.windows)
    with torch.inference_mode():
        return model.states(built, caches)


def shards(directory: Path, ranks: ThreadRanks, quantization: str = "none") -> list[Decoder]:
    checkpoint = Checkpoint.open(directory, dtype="float32", quantization_name=quantization)
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


@pytest.mark.one_in(2)
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
    assert [call for call, _ in ranks.calls] == ["all_reduce"] * (2 * whole.config.num_layers + 1) + [
        "gather"
    ]


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small Llama, Qwen 3 MoE and Phi-3 in every format. Blocks of 64 inputs divide the Llama only."""
    return quantized_directories.write(
        tmp_path_factory.mktemp("quantised"), ["Llama", "Qwen3Moe", "Phi3"], {"Llama": {"head_dim": 32}}
    )


FORMATS = [
    (family, format_)
    for family in ("Llama", "Qwen3Moe", "Phi3")
    for format_ in quantized_matrix.FORMATS
    if family == "Llama" or format_ != "FP8 by block"
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("family", "format_"), FORMATS)
def test_ranks_together_compute_the_logits_of_the_whole_quantised_model(
    quantised: Path, family: str, format_: str
) -> None:
    directory = quantised / family / format_
    checkpoint = Checkpoint.open(directory, dtype="float32", quantization_name="none")
    expected = forward(checkpoint.read(max_len=256, device=CPU, on_progress=lambda *_: None), PROMPT)
    ranks = ThreadRanks(2)
    results = ranks.run([partial(forward, model, PROMPT) for model in shards(directory, ranks)])
    torch.testing.assert_close(results[0], expected, atol=2e-4, rtol=1e-3)


INT4 = ["GPTQ", "GPTQ, whole rows", "AWQ", "int4 w4a16 asymmetric"]


@pytest.mark.parametrize(
    ("family", "format_"), [*(("Llama", format_) for format_ in INT4), ("Qwen3Moe", "AWQ"), ("Phi3", "GPTQ")]
)
def test_four_bits_are_multiplied_as_stored_by_one_rank_and_by_two(
    quantised: Path, family: str, format_: str
) -> None:
    directory = quantised / family / format_
    checkpoint = Checkpoint.open(directory, dtype="float32", quantization_name="int4")
    assert checkpoint.quantization.endswith(", int4")
    whole = checkpoint.read(max_len=256, device=CPU, on_progress=lambda *_: None)
    output = whole.layers[0].linears[0]
    assert isinstance(output, StoredInt4) and not output.targets(), "stored integers are freed"
    result = forward(whole, PROMPT)
    ranks = ThreadRanks(2)
    of_ranks = ranks.run([partial(forward, model, PROMPT) for model in shards(directory, ranks, "int4")])
    # Groups of inputs follow the shards: sums are in another order, by which few activations round otherwise.
    assert relative_error(of_ranks[0], result) < 1e-3
    float_model = Checkpoint.open(directory, dtype="float32", quantization_name="none")
    expected = forward(float_model.read(max_len=256, device=CPU, on_progress=lambda *_: None), PROMPT)
    assert relative_error(result, expected) < 4e-3


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Mean square, as part of the expected values'."""
    return float((result - expected).square().mean() / expected.square().mean())


@pytest.mark.parametrize("size", [1, 2])
def test_a_float_model_is_rounded_to_the_same_int4_by_any_number_of_ranks(quantised: Path, size: int) -> None:
    directory = quantised / "Llama" / "float"
    ranks = ThreadRanks(size)
    results = ranks.run([partial(forward, model, PROMPT) for model in shards(directory, ranks, "int4")])
    whole = Checkpoint.open(directory, dtype="float32", quantization_name="int4")
    expected = forward(whole.read(max_len=256, device=CPU, on_progress=lambda *_: None), PROMPT)
    assert relative_error(results[0], expected) < 1e-3


def test_a_kernel_has_the_groups_of_a_gptq_shard_from_its_first_one_on() -> None:
    weights = GPTQ(32)
    whole = {
        suffix: torch.randint(1 << 30, spec.shape).to(torch.int32)
        for suffix, spec in weights.tensors("layer", 128, 16).items()
    }
    whole |= {"scales": torch.rand(4, 16), "g_idx": (torch.arange(128) // 32).int()}
    firsts = {"qweight": 8, "qzeros": 2, "scales": 2, "g_idx": 64}
    second_half = {suffix: whole[suffix][first:] for suffix, first in firsts.items()}
    multiplied = w4_dequantize(weights.four_bits("layer", second_half))
    assert torch.equal(multiplied.T, weights.dequantize("layer", second_half))


def test_blocks_of_weights_that_a_shard_would_cut_are_refused(quantised: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"2 ranks: .* stored in groups \(fp8\)\. Set --tensor-parallel-size to one of 1\."
    ):
        shards(quantised / "Phi3" / "FP8 by block", ThreadRanks(2))


def test_a_size_that_does_not_divide_the_model_is_refused_with_those_that_do(tmp_path: Path) -> None:
    families.build(tmp_path, "Llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72,
                                       "intermediate_size": 96})  # as SmolLM2-135M  # fmt: skip
    with pytest.raises(
        ConfigError,
        match=r"9 heads, 3 heads of keys .* size of 96\. Set --tensor-parallel-size to one of 1, 3\.",
    ):
        shards(tmp_path, ThreadRanks(2))
    ranks = ThreadRanks(3)
    assert [model.config.num_kv_heads for model in shards(tmp_path, ranks)] == [1, 1, 1]


def allowed(checkpoint: Checkpoint, ranks: int) -> float:
    """Bytes that one of so many ranks may read and hold: its share with 2 % more, the rows by which the first
    ranks have more of the vocabulary than the last one, and what every rank needs: vectors, routers, and
    keys' and values' heads that are fewer than the ranks.
    """
    config = checkpoint.config
    sizes = {one.name: (one.size, one.shape) for shard in checkpoint.shards for one in shard.tensors}
    replicated = sum(
        size
        for name, (size, shape) in sizes.items()
        if math.prod(shape) == max(shape, default=1) or name.endswith(".gate.weight")
    )
    total = sum(size for size, _ in sizes.values())
    keys = sum(size for name, (size, _) in sizes.items() if "k_proj." in name or "v_proj." in name)
    fused = sum(size for name, (size, _) in sizes.items() if "qkv_proj." in name)
    keys += fused * 2 * config.num_kv_heads // (config.num_heads + 2 * config.num_kv_heads)
    again = keys * max(0.0, 1 / config.num_kv_heads - 1 / ranks)
    vocab = sum(size for name, (size, _) in sizes.items() if "embed_tokens." in name or "lm_head." in name)
    uneven = vocab * (Topology(ranks).padded_part(config.vocab_size) / config.vocab_size - 1 / ranks)
    return 1.02 * (total - replicated) / ranks + replicated + again + uneven


def bytes_read() -> int:
    """Bytes that this process has read by system calls."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def read_and_held(directory: Path, ranks: int) -> list[tuple[int, int]]:
    """(bytes that a rank reads, bytes of its weights) by rank."""
    found = []
    checkpoint = Checkpoint.open(directory, dtype="float32", quantization_name="none")
    for rank in range(ranks):
        before = bytes_read()
        model = checkpoint.read_shard(Topology(ranks, rank), SingleRank(), max_len=64, device=CPU)
        read = bytes_read() - before - len(Path("/proc/self/io").read_text())
        found.append((read, sum(tensor.nbytes for tensor in model.targets().values())))
    return found


def test_damage_of_a_file_is_found_by_one_of_the_ranks(tmp_path: Path) -> None:
    families.make(tmp_path, "Llama, tied")
    write_manifest(tmp_path)
    shards(tmp_path, ThreadRanks(2))
    path = tmp_path / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ModelCorruptError, match="sha256"):
        shards(tmp_path, ThreadRanks(2))


def test_damage_of_a_nodes_own_copy_is_found_on_that_node(tmp_path: Path) -> None:
    families.make(tmp_path, "Llama, tied")
    write_manifest(tmp_path)
    path = tmp_path / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    checkpoint = Checkpoint.open(tmp_path, dtype="float32", quantization_name="none")
    for rank in range(2):
        with pytest.raises(ModelCorruptError, match="sha256"):
            checkpoint.read_shard(Topology(2, rank, nodes=2), SingleRank(), max_len=64, device=CPU)


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if divided(variant)])
def test_a_rank_reads_and_holds_its_part_of_the_weights_and_no_more(tmp_path: Path, variant: str) -> None:
    families.make(tmp_path, variant)
    checkpoint = Checkpoint.open(tmp_path, dtype="float32", quantization_name="none")
    for size in divided(variant):
        bound = allowed(checkpoint, size)
        assert bound < 0.8 * checkpoint.size
        for read, held in read_and_held(tmp_path, size):
            assert read <= bound
            assert held <= bound


def matrices(model: Decoder) -> list[Tensor]:
    """The weights of the linear layers, in the form that they compute with."""
    return [tensor for layer in model.layers for linear in layer.linears for tensor in linear.weights()]


@pytest.mark.parametrize(("family", "format_"), FORMATS)
def test_a_rank_reads_and_holds_its_part_of_quantised_weights_and_no_more(
    quantised: Path, family: str, format_: str
) -> None:
    directory = quantised / family / format_
    checkpoint = Checkpoint.open(directory, dtype="float32", quantization_name="none")
    bound = allowed(checkpoint, 2)
    for read, _ in read_and_held(directory, 2):
        assert read <= bound
    held = matrices(checkpoint.read(max_len=64, device=CPU, on_progress=lambda *_: None))
    vectors = sum(tensor.nbytes for tensor in held if tensor.numel() == max(tensor.shape, default=1))
    most = 1.02 * (sum(tensor.nbytes for tensor in held) - vectors) / 2 + vectors
    for shard in shards(directory, ThreadRanks(2)):
        assert 0 < sum(tensor.nbytes for tensor in matrices(shard)) <= most


def stages(
    directory: Path, ranks: ThreadRanks, tensor: int, pipeline: int, **options: object
) -> list[Decoder]:
    checkpoint = Checkpoint.open(
        directory,
        **({"dtype": "float32", "quantization_name": "none"} | options),  # type: ignore[arg-type]
    )
    return [
        checkpoint.read_shard(Topology(tensor, rank, pipeline), communicator, max_len=256, device=CPU)
        for rank, communicator in enumerate(ranks.communicators)
    ]


def take_part(model: Decoder) -> Tensor | None:
    """A rank's part in the forward pass of a prompt: the logits, on rank 0."""
    topology = model.config.topology
    if topology.is_leader or topology.is_last_stage:
        return forward(model, PROMPT)
    forward_states(model, PROMPT)
    return None


@pytest.mark.one_in(2)
@pytest.mark.parametrize("variant", [*VARIANTS])
def test_stages_compute_the_same_bits_as_the_whole_model(tmp_path: Path, variant: str) -> None:
    families.make(tmp_path, variant)
    checkpoint = Checkpoint.open(tmp_path, dtype="float32", quantization_name="none")
    whole = checkpoint.read(max_len=256, device=CPU, on_progress=lambda *_: None)
    expected = forward(whole, PROMPT)
    ranks = ThreadRanks(1, pipeline=2)
    results = ranks.run([partial(take_part, model) for model in stages(tmp_path, ranks, 1, 2)])
    assert results[0] is not None
    assert torch.equal(results[0], expected)


def test_ranks_of_stages_compute_the_same_bits_as_the_ranks_of_one_stage(tmp_path: Path) -> None:
    families.build(tmp_path, "Qwen3", {"num_hidden_layers": 3})
    ranks = ThreadRanks(2)
    expected = ranks.run([partial(forward, model, PROMPT) for model in shards(tmp_path, ranks)])[0]
    ranks = ThreadRanks(2, pipeline=3)
    results = ranks.run([partial(take_part, model) for model in stages(tmp_path, ranks, 2, 3)])
    assert results[0] is not None
    assert torch.equal(results[0], expected)


def test_stages_are_balanced_with_the_head_also_where_it_is_the_embedding() -> None:
    checkpoint = Checkpoint.open(models.smollm2(), dtype="bfloat16", quantization_name="none")
    assert checkpoint.config.tie_word_embeddings
    for stages, layers in ((2, [19, 11]), (3, [13, 12, 5])):
        assert [checkpoint.shard(Topology(1, rank, stages)).num_layers for rank in range(stages)] == layers


def test_more_stages_than_layers_are_refused(tmp_path: Path) -> None:
    families.build(tmp_path, "Llama", {"num_hidden_layers": 2})
    with pytest.raises(
        ConfigError, match=r"3 stages: it has 2 layers\. Set --pipeline-parallel-size to 2 or"
    ):
        stages(tmp_path, ThreadRanks(1, 3), 1, 3)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_stage_reads_its_layers_and_no_more(tmp_path: Path, is_tied: bool) -> None:
    families.build(
        tmp_path, "Llama", {"num_hidden_layers": 4, "vocab_size": 4096, "tie_word_embeddings": is_tied}
    )
    checkpoint = Checkpoint.open(tmp_path, dtype="float32", quantization_name="none")
    tensors = registry.tensors(checkpoint.config)
    held: list[str] = []
    for rank in range(3):
        read: list[int] = []
        model = checkpoint.read_shard(
            Topology(1, rank, 3),
            SingleRank(),
            max_len=64,
            device=CPU,
            on_progress=lambda done, total, read=read: read.append(done),
        )
        targets = model.targets()
        assert read[-1] == sum(tensors[name].nbytes for name in targets)
        assert model.embedding.nbytes == targets.get("model.embed_tokens.weight", torch.empty(0)).nbytes
        held += targets
    assert sorted(held) == sorted([*tensors, *["model.embed_tokens.weight"] * is_tied])
