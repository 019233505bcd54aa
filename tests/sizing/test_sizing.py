"""Sizes agree with transformers, with the server and with known figures; invalid limits are refused."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from e2e import models
from quire_server.api import response_store
from quire_server.core import topology
from quire_server.core.topology import Topology
from quire_server.engine import adapter_registry
from quire_server.health import model_config
from quire_server.layers.linear import Linear
from quire_server.models import registry, sharding
from quire_server.runner import kv_cache
from quire_server.runner.adapters import Adapters
from quire_sizing import memory
from quire_sizing.errors import SizingError
from quire_sizing.memory import Accelerator, Serving, Verdict
from quire_sizing.model import ModelShape, from_config, rank_parameters, tensor_sizes
from quire_sizing.stages import balance, stage_layers, stages, utilization
from tests.server.models import families
from tests.server.models.variants import VARIANTS

GB = 10**9
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}


def shape(parameters: float, layers: int, kv_heads: int, longest: int = 131072) -> ModelShape:
    return ModelShape(
        parameters=int(parameters),
        num_layers=layers,
        num_kv_heads=kv_heads,
        head_size=128,
        hidden_size=5120,
        vocab_size=32000,
        longest=longest,
    )


LLAMA_2_7B, LLAMA_2_13B, WITHOUT_GQA = shape(7e9, 32, 32), shape(13e9, 40, 40), shape(70e9, 80, 64)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_family_has_as_many_parameters_as_transformers_counts_and_the_servers_cache(
    variant: str, tmp_path: Path
) -> None:
    theirs = families.make(tmp_path, variant)
    document = json.loads((tmp_path / "config.json").read_text())
    model = from_config(document)

    assert model.parameters == theirs.num_parameters()
    assert from_config(model_config.read(tmp_path)) == model, "what a pod reports of its model is enough"
    config = registry.parse(document, ())
    for bits, stored in ((32, torch.float32), (16, torch.bfloat16), (8, torch.int8)):
        assert 16 * memory.kv_bytes_per_token(model, bits) == kv_cache.block_bytes(config, 16, stored)


@pytest.mark.parametrize("variant", VARIANTS)
def test_places_for_adapters_of_every_family_are_as_large_as_the_servers(
    variant: str, tmp_path: Path
) -> None:
    families.make(tmp_path, variant)
    document = json.loads((tmp_path / "config.json").read_text())
    model, config = from_config(document), registry.parse(document, ())
    skeleton = registry.build(
        config, max_len=1, dtype=torch.bfloat16, device=torch.device("meta"), linear=Linear
    )
    for dtype, bits in ((torch.bfloat16, 16), (torch.float32, 32)):
        places = Adapters(skeleton, 3, 8, dtype, torch.device("meta"))
        serving = Serving(max_adapters=3, max_adapter_rank=8, adapter_bits=bits)
        assert memory.adapter_bytes(model, serving) == places.slot_bytes
        sharded = sharding.shard(config, Topology(2)) if 2 in tensor_sizes(model) else config
        divided = registry.build(sharded, max_len=1, dtype=dtype, device=torch.device("meta"), linear=Linear)
        part = replace(serving, tensor=sharded.topology.tensor)
        assert memory.adapter_bytes(model, part) == Adapters(divided, 3, 8, dtype, None).slot_bytes
        held = [one for linear in places._linears for one in (linear._a, linear._b)]
        assert 3 * memory.adapter_bytes(model, serving) == sum(one.nbytes for one in held)


def test_places_for_adapters_are_no_room_for_the_cache_and_the_host_has_a_quarter_for_the_rest() -> None:
    model = from_config(LLAMA_8B)
    plain, serving = Serving(max_model_len=8192), Serving(max_model_len=8192, max_adapters=8)
    accelerator = Accelerator(memory=80 * GB)
    each = memory.adapter_bytes(model, serving)
    assert each == 16 * 2 * 32 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))
    with_places, without = (memory.budget(model, accelerator, one) for one in (serving, plain))
    assert with_places.adapters == 8 * each and without.adapters == 0
    (stage,), (other,) = (memory.stage_budgets(model, accelerator, one) for one in (serving, plain))
    assert other.room - stage.room == 8 * each
    assert memory.need(model, accelerator, serving).least == (
        memory.need(model, accelerator, plain).least + 8 * each
    )

    halves = memory.stage_budgets(model, accelerator, replace(serving, pipeline=2))
    alone = memory.stage_budgets(model, accelerator, replace(plain, pipeline=2))
    taken = [one.room - other.room for one, other in zip(alone, halves, strict=True)]
    assert taken == [8 * each * stage.layers // 32 for stage in halves]

    host = memory.RESPONSES + 4 * 10 * each
    assert memory.host_adapters(model, serving, host) == 10
    assert memory.host_adapters(model, serving, host - 4) == 9
    assert memory.adapter_advice(model, serving, host_memory=host) == ()
    (hint,) = memory.adapter_advice(model, serving, host_memory=host // 2)
    assert "room for 4 adapters of rank 16" in hint and "resources.memory" in hint
    assert memory.host_adapters(model, serving, 1 << 50) == adapter_registry.MAX_ADAPTERS


def test_kept_responses_are_no_room_for_weights_on_their_way() -> None:
    assert response_store.MAX_BYTES == memory.RESPONSES
    serving, accelerator = Serving(max_model_len=4096), Accelerator(memory=80 * GB)
    assert not memory.advice(serving, accelerator, host_memory=80 * GB + memory.RESPONSES)
    (hint,) = memory.advice(serving, accelerator, host_memory=80 * GB + memory.RESPONSES - 1)
    assert "keeps responses" in hint
    assert not memory.advice(replace(serving, pools=True), accelerator, host_memory=80 * GB)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_family_is_divided_as_the_server_divides_it(variant: str, tmp_path: Path) -> None:
    families.make(tmp_path, variant)
    document = json.loads((tmp_path / "config.json").read_text())
    model, config = from_config(document), registry.parse(document, ())

    assert tensor_sizes(model) == sharding.sizes(config)
    for size in tensor_sizes(model):
        local = sharding.shard(config, Topology(size, 0))
        held = sum(tensor.numel() for tensor in registry.tensors(local).values())
        assert rank_parameters(model, size) == held
        assert 16 * memory.kv_bytes_per_token(model, 16, size) == kv_cache.block_bytes(
            local, 16, torch.bfloat16
        )


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_stages_of_every_family_are_those_of_the_server(variant: str, tmp_path: Path) -> None:
    families.make(tmp_path, variant)
    document = json.loads((tmp_path / "config.json").read_text())
    model, config = from_config(document), registry.parse(document, ())
    layers = registry.layer_bytes(config, torch.bfloat16, Linear)
    head = registry.head_bytes(config, torch.bfloat16, Linear)
    is_even = len(set(layers)) == 1

    for pipeline in range(1, model.num_layers + 1):
        expected = topology.stage_layers(layers, head, pipeline)
        for size in tensor_sizes(model):
            found = stages(model, pipeline, size)
            assert sum(stage.layers for stage in found) == model.num_layers
            if not is_even:
                continue
            assert [stage.layers for stage in found] == [each.size for each in expected]
            for index, stage in enumerate(found):
                place = Topology(size, index * size, pipeline)
                part = sharding.shard(config, place, None if pipeline == 1 else expected[index])
                held = sum(tensor.numel() for tensor in registry.tensors(part).values())
                assert stage.parameters == held, (pipeline, size, index)


def test_stages_of_any_sizes_are_balanced_as_the_servers() -> None:
    dice, compared = random.Random(3), 0
    for _ in range(400):
        layers, layer, head = dice.randint(1, 24), dice.randint(1, 300), dice.randint(1, 2000)
        model = ModelShape(
            parameters=layers * layer + head,
            num_layers=layers,
            num_kv_heads=1,
            head_size=1,
            hidden_size=1,
            vocab_size=head,
            longest=1,
            vocab_parameters=head,
        )
        for pipeline in range(1, min(layers, 14) + 1):
            theirs = topology.stage_layers([layer] * layers, head, pipeline)
            assert stage_layers(model, pipeline) == tuple(each.size for each in theirs), (model, pipeline)
            compared += 1
    assert compared > 2000


def test_the_bubble_is_what_is_left_of_busy_stages_and_one_stage_has_none() -> None:
    model = from_config(json.loads((models.smollm2() / "config.json").read_text()))
    found = stages(model, 3)

    assert [stage.layers for stage in found] == [13, 12, 5]
    assert balance(found) == pytest.approx(13 / 13, abs=0.05), "the head is as large as 8 layers"
    shares = [utilization(found, streams) for streams in (1, 2, 3, 7)]
    assert shares == [pytest.approx(balance(found) * min(1, streams / 3)) for streams in (1, 2, 3, 7)]
    assert utilization(stages(model, 1), 1) == 1
    for pipeline in (0, 31):
        with pytest.raises(SizingError, match=rf"among {pipeline} stages; give 1 to 30"):
            memory.budget(model, Accelerator(memory=GB), Serving(pipeline=pipeline))


def test_the_stage_with_room_for_the_fewest_tokens_decides() -> None:
    model = from_config(json.loads((models.smollm2() / "config.json").read_text()))
    asked = Serving(max_model_len=2048, max_num_seqs=1 << 10, pipeline=3)

    found = memory.budget(model, Accelerator(memory=2 * GB), asked)

    tokens = [stage.room // stage.kv_per_token for stage in found.stages]
    assert found.concurrency == min(tokens) // 2048 and tokens[0] == min(tokens)
    assert (found.weights, found.kv_per_token) == (found.stages[0].weights, found.stages[0].kv_per_token)
    assert sum(stage.kv_per_token for stage in found.stages) == memory.kv_bytes_per_token(model)
    twice = memory.weight_bytes(model.vocab_size * model.hidden_size), memory.weight_bytes(model.parameters)
    assert sum(stage.weights for stage in found.stages) == pytest.approx(sum(twice), rel=1e-3), (
        "tied: on both"
    )
    logits = 2 * 4 * asked.max_num_seqs * model.vocab_size
    first, middle, last = (stage.workspace for stage in found.stages)
    assert first == last == middle + logits, "the first stage samples, the last one has the head"
    limited = memory.budget(model, Accelerator(memory=2 * GB), replace(asked, kv_memory=3 << 20))
    assert [stage.room for stage in limited.stages] == [1 << 20] * 3


def test_what_stages_hand_on_and_the_buffers_of_ranks_are_counted() -> None:
    model = from_config(json.loads((models.smollm2() / "config.json").read_text()))
    one, two, four = (memory.workspace(model, Serving(pipeline=count)) for count in (1, 2, 4))

    assert memory.handed_on_bytes(model, 1, bits=32) == 2 * 576 * 4
    assert four - two == 2 * memory.handed_on_bytes(model, 2048), "of each step in flight"
    assert two - one > 3 * memory.handed_on_bytes(model, 2048), "and buffers through which ranks exchange"


def test_smollm2_is_divided_by_three_and_says_so() -> None:
    model = from_config(json.loads((models.smollm2() / "config.json").read_text()))
    card = Accelerator(memory=GB)

    assert tensor_sizes(model) == (1, 3)
    with pytest.raises(SizingError, match=r"among 2 ranks; give one of 1, 3\."):
        memory.budget(model, card, Serving(tensor=2))
    whole, third = (memory.budget(model, card, Serving(max_num_seqs=1, tensor=size)) for size in (1, 3))
    assert 3 * third.kv_per_token == whole.kv_per_token
    assert third.weights == pytest.approx(whole.weights / 3, rel=2e-3), "but for norms, which all ranks have"
    assert memory.exchanges(model.num_layers) == 61
    assert memory.exchanged_bytes(model, 1, bits=32) == 61 * 576 * 4


def test_weights_of_a_real_checkpoint_are_its_bytes_on_disk() -> None:
    directory = models.smollm2()
    model = from_config(json.loads((directory / "config.json").read_text()))

    on_disk = sum(path.stat().st_size for path in directory.glob("*.safetensors"))

    assert memory.weight_bytes(model.parameters) == pytest.approx(on_disk, rel=1e-3)


@pytest.mark.parametrize(
    ("model", "tokens", "size"),
    [
        (LLAMA_2_7B, 1, 524_288),
        (LLAMA_2_7B, 4096, 2.147 * GB),
        (WITHOUT_GQA, 1, 2.62e6),
        (WITHOUT_GQA, 4096, 10.7 * GB),
        (WITHOUT_GQA, 131072, 343 * GB),
    ],
)
def test_kv_bytes_are_the_known_ones(model: ModelShape, tokens: int, size: float) -> None:
    assert tokens * memory.kv_bytes_per_token(model) == pytest.approx(size, rel=4e-3)


def test_grouped_queries_and_a_byte_for_a_number_divide_the_cache() -> None:
    whole = memory.kv_bytes_per_token(WITHOUT_GQA)

    assert 8 * memory.kv_bytes_per_token(shape(70e9, 80, 8)) == whole
    scales = 2 * 80 * 64 * 4
    assert 2 * (memory.kv_bytes_per_token(WITHOUT_GQA, bits=8) - scales) == whole


@pytest.mark.parametrize(
    ("parameters", "bits", "size"), [(7e9, 16, 14 * GB), (7e9, 4, 3.5 * GB), (70e9, 4, 35 * GB)]
)
def test_weights_are_the_known_ones(parameters: float, bits: int, size: float) -> None:
    assert memory.weight_bytes(int(parameters), bits) == size


def test_one_stream_is_bounded_by_reading_the_weights() -> None:
    assert round(memory.decode_bound(3.35e12, 14 * GB)) == 239  # often quoted rounded down, as 238


@pytest.mark.parametrize(
    ("bits", "length", "concurrency"),
    [(16, 4096, 13), (16, 8192, 6), (16, 16384, 3), (4, 4096, 19), (4, 8192, 9), (4, 16384, 4)],
)
def test_a_13b_model_on_80_gb_serves_so_many_at_once(bits: int, length: int, concurrency: int) -> None:
    asked = Serving(max_model_len=length, weight_bits=bits)

    found = memory.budget(LLAMA_2_13B, Accelerator(memory=80 * GB), asked)

    assert (found.usable, found.verdict, found.concurrency) == (72 * GB, Verdict.FEWER, concurrency)
    assert found.weights + found.workspace + concurrency * length * found.kv_per_token <= found.usable


def test_what_does_not_fit_says_how_long_a_context_would() -> None:
    small = Accelerator(memory=32 * GB)

    found = memory.budget(LLAMA_2_13B, small, Serving(max_model_len=16384, max_num_seqs=8))
    shorter = memory.budget(LLAMA_2_13B, small, Serving(max_model_len=found.longest, max_num_seqs=1))
    hopeless = memory.budget(LLAMA_2_13B, Accelerator(memory=24 * GB), Serving())

    assert found.verdict is Verdict.NOTHING
    assert hopeless.verdict is Verdict.NOTHING and hopeless.longest == 0
    assert 0 < found.longest < 16384 and shorter.verdict is Verdict.FITS


def test_what_is_likely_a_mistake_is_named_with_its_remedy() -> None:
    card, host = Accelerator(memory=80 * GB), 128 * GB

    assert memory.advice(Serving(max_model_len=4096), card, host_memory=host) == ()
    for serving, memory_of_host, words in (
        (Serving(max_model_len=4096, utilization=0.95), host, "memoryPercent"),
        (Serving(max_model_len=4096, utilization=0.5), host, "memoryPercent"),
        (Serving(), host, "maxModelLen"),
        (Serving(max_model_len=4096), 64 * GB, "resources.memory"),
    ):
        (found,) = memory.advice(serving, card, host_memory=memory_of_host)
        assert words in found


def test_several_ranks_over_pcie_alone_are_advised_against() -> None:
    card, host = Accelerator(memory=80 * GB, interconnect="PCIe"), 128 * GB
    several = Serving(max_model_len=4096, tensor=2)

    (found,) = memory.advice(several, card, host_memory=host)

    assert "PCIe alone connects their accelerators" in found and "parallelism.tensor to 1" in found
    assert memory.advice(replace(several, tensor=1), card, host_memory=host) == ()
    assert memory.advice(several, replace(card, interconnect="NVLink"), host_memory=host) == ()
    assert memory.advice(several, replace(card, interconnect=""), host_memory=host) == (), "not known"


@pytest.mark.parametrize(
    ("tensor", "pipeline", "nodes", "is_spread"),
    [
        (8, 2, 2, False),
        (4, 4, 2, False),  # two stages on each
        (8, 1, 1, False),
        (1, 4, 4, False),
        (16, 1, 2, True),
        (2, 3, 2, True),  # the second of three stages
        (8, 2, 4, True),
    ],
)
def test_ranks_that_add_their_results_over_a_network_are_advised_to_be_stages(
    tensor: int, pipeline: int, nodes: int, is_spread: bool
) -> None:
    card, host = Accelerator(memory=80 * GB, interconnect="NVLink"), 128 * GB
    serving = Serving(max_model_len=4096, tensor=tensor, pipeline=pipeline, nodes=nodes)

    found = memory.advice(serving, card, host_memory=host)

    assert len(found) == is_spread
    for hint in found:
        assert f"{tensor * pipeline // nodes} accelerators on each of {nodes}" in hint
        assert "Set parallelism.pipeline to the number of nodes" in hint


def test_nodes_change_nothing_of_what_an_accelerator_holds() -> None:
    card, on_one = Accelerator(memory=80 * GB), Serving(max_model_len=4096, pipeline=4)
    found = memory.budget(LLAMA_2_7B, card, replace(on_one, nodes=2))
    assert found == memory.budget(LLAMA_2_7B, card, on_one)


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (Serving(pipeline=4, nodes=3), "4 accelerators cannot be spread over 3 nodes"),
        (Serving(nodes=0), "over 0 nodes"),
        (Serving(tensor=0), "among 0 ranks; give one of 1"),
        (Serving(tensor=-2), "among -2 ranks"),
        (Serving(tensor=-2, pipeline=-1), "among -2 ranks"),
        (Serving(weight_bits=0), "weight-bits is 0; give 16, 8 or 4"),
        (Serving(weight_bits=-4), "weight-bits is -4"),
        (Serving(weight_bits=float("nan")), "weight-bits is nan"),
        (Serving(max_model_len=1 << 30), "maxModelLen"),
        (Serving(max_num_seqs=0), "maxNumSeqs"),
        (Serving(utilization=1.5), "gpu-memory-utilization"),
        (Serving(max_adapters=1, pools=True), "leave out max-adapters"),
        (Serving(max_adapters=-1), "max-adapters has to be 0 or more"),
        (Serving(max_adapters=1, max_adapter_rank=0), "max-adapter-rank 1 or more"),
    ],
)
def test_a_limit_that_is_none_is_refused_by_name(asked: Serving, named: str) -> None:
    with pytest.raises(SizingError, match=named):
        memory.budget(LLAMA_2_7B, Accelerator(memory=80 * GB), asked)


@pytest.mark.parametrize("value", [None, -1, 0, True, "4096", 1 << 60])
def test_a_config_without_a_size_is_refused_by_its_key(value: object) -> None:
    document = json.loads((models.smollm2() / "config.json").read_text()) | {"hidden_size": value}

    with pytest.raises(SizingError, match="hidden_size"):
        from_config(document)


MINILM = {
    "model_type": "bert",
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
}


def test_an_encoder_is_counted_exactly_and_needs_no_kv_cache():
    model = from_config(MINILM)
    assert model.parameters == 22_565_376  # of all-MiniLM-L6-v2, without its pooler of 147,840
    found = memory.budget(model, Accelerator(memory=GB), Serving(pools=True))
    assert found.verdict is Verdict.FITS and found.kv_wanted == 0 and found.concurrency == 256
    assert found.weights == 2 * model.parameters
    small = memory.budget(model, Accelerator(memory=GB // 2), Serving(pools=True))
    assert small.verdict is Verdict.NOTHING and not small.concurrency and not small.longest
