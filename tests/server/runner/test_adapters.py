"""Requests with LoRA adapters get the greedy tokens of the models into which these are merged, on one rank
and on several.
"""

import math
from dataclasses import replace

import pytest
import torch

from e2e import models
from quire_server.core.config import PreemptionMode, SpeculationConfig, SpeculativeMethod
from quire_server.core.request import Request
from quire_server.errors import ModelCorruptError, QuireServerError
from quire_server.models import adapter_file, weights
from quire_server.models.adapter_file import HostRoom
from quire_server.runner import kv_cache
from quire_server.runner.model_runner import ModelRunner
from tests.server import adapter_files, tiny_model
from tests.server.runner.gpu.fake_device import FakeDevice
from tests.server.runner.gpu.test_executor import gpu_runner
from tests.server.runner.in_process import InProcessEngine, greedy, load
from tests.server.runner.ranks_in_process import Ranks

PROMPTS = [[3 + (7 * i * n) % 250 for i in range(n)] for n in (5, 40, 23, 61, 2, 17)]
ADAPTERS = [1, 0, 2, 3, 2, 1]  # of the prompts; 0: none
LENGTH = 12
KINDS = [
    {"rank": 4},
    {"rank": 8, "alpha": 4.0, "targets": ("q_proj", "v_proj")},
    {"rank": 1, "alpha": 1.0, "use_rslora": True, "targets": ("o_proj", "gate_proj", "down_proj")},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("adapters") / "model")


@pytest.fixture(scope="module")
def adapters(model):
    return [
        adapter_files.write(model.parent / f"adapter-{number}", model, seed=number, **kind)
        for number, kind in enumerate(KINDS, start=1)
    ]


@pytest.fixture(scope="module")
def expected(model, adapters):
    """The tokens of each prompt with its adapter, of a model with the adapter merged into it."""
    models = [model] + [
        adapter_files.merged(model, one, model.parent / f"merged-{one.name}") for one in adapters
    ]
    answers = [
        InProcessEngine(load(models[number])).generate([prompt], greedy(LENGTH))[0]
        for prompt, number in zip(PROMPTS, ADAPTERS, strict=True)
    ]
    assert answers[0] != InProcessEngine(load(model)).generate([PROMPTS[0]], greedy(LENGTH))[0]
    return answers


def with_adapters(runner: ModelRunner, directories) -> ModelRunner:
    for number, directory in enumerate(directories, start=1):
        runner.adapters.add(number, runner.adapters.read(directory))
    return runner


def answers(runner: ModelRunner, *, rounds: int = 1, preemptions=None, **limits) -> list[list[list[int]]]:
    """Of all prompts at once, as often as there are rounds. ``preemptions`` gets their number."""
    engine = InProcessEngine(runner, **limits)
    found = []
    for round_number in range(rounds):
        tokens: dict[str, list[int]] = {}
        for index, (prompt, adapter) in enumerate(zip(PROMPTS, ADAPTERS, strict=True)):
            name = f"{round_number}-{index}"
            tokens[name] = []
            engine.scheduler.add(
                Request(name, tuple(prompt), greedy(LENGTH), arrival=0.0),
                adapter=adapter,
                adapter_key=f"a{adapter}" if adapter else "",
            )
        while (step := engine.scheduler.schedule()) is not None:
            for event in engine.scheduler.commit(step, runner.run(step)):
                assert event.error is None, event.error
                tokens[event.request_id] += event.token_ids
        engine.scheduler.check()
        found.append(list(tokens.values()))
    if preemptions is not None:
        preemptions.append(engine.scheduler.stats.preemptions)
    return found


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_a_batch_of_adapters_and_the_base_has_the_tokens_of_merged_models(
    model, adapters, expected, num_slots
):
    runner = with_adapters(load(model, max_adapters=num_slots), adapters)
    for found in answers(runner, rounds=2, num_adapter_slots=num_slots):  # the second one has prefix hits
        assert found == expected


@pytest.mark.parametrize("mode", PreemptionMode)
@pytest.mark.parametrize("method", [SpeculativeMethod.NGRAM, SpeculativeMethod.DRAFT_MODEL])
def test_adapters_survive_chunks_preemption_tiers_and_drafts(model, adapters, expected, method, mode):
    options = {"speculative_model": model} if method is SpeculativeMethod.DRAFT_MODEL else {}
    tier = {"kv_offload_host_bytes": 1 << 20}
    runner = load(model, max_adapters=3, num_speculative_tokens=3, **options, **tier)
    limits = {"speculation": SpeculationConfig(method, 3), "preemption_mode": mode, "num_blocks": 7}
    limits |= {"max_num_batched_tokens": 9, "max_num_seqs": 6, "num_host_slots": runner.num_host_slots}
    preemptions = []
    found = answers(with_adapters(runner, adapters), preemptions=preemptions, num_adapter_slots=3, **limits)
    assert found == [expected] and preemptions[0] > 0


def test_an_asynchronous_device_has_the_same_tokens(model, adapters, expected):
    runner = gpu_runner(FakeDevice(), model, max_adapters=2, num_blocks_override=60)
    assert answers(with_adapters(runner, adapters), num_adapter_slots=2) == [expected]


def read_by_all(ranks: Ranks, number, directory):
    """The result of a load on all ranks."""
    adapters = ranks.runner.adapters
    reading = adapters.begin(number, directory)
    while not reading.done():
        adapters.exchange()
    return reading.result()


@pytest.fixture(scope="module", params=[(2, 1), (1, 2)], ids=["2 ranks", "2 stages"])
def ranks(model, request):
    divided = Ranks(model, *request.param, max_adapters=2, kv_offload_host_bytes=1 << 20)
    yield divided
    divided.close()


def held(ranks: Ranks):
    """(numbers of adapters, bytes taken of the host's memory) of each rank other than the first."""
    each = [follower._adapters._own for follower in ranks.followers]
    return [(sorted(one._files), one.room._taken) for one in each]


def test_ranks_and_stages_answer_with_adapters_as_one_rank(model, adapters, expected, ranks):
    whole = load(model, max_adapters=1).adapters
    for number, directory in enumerate(adapters, start=1):
        own, all_of_it = read_by_all(ranks, number, directory), whole.read(directory)
        assert own.size < all_of_it.size and own.digest == all_of_it.digest
        ranks.runner.adapters.add(number, own)
    limits = {"num_blocks": 24, "preemption_mode": PreemptionMode.SWAP, "max_num_batched_tokens": 40}
    limits["num_host_slots"] = ranks.runner.num_host_slots
    for found in answers(ranks.runner, rounds=2, num_adapter_slots=2, **limits):  # then with prefix hits
        assert found == expected
    for number in (1, 2, 3):
        ranks.runner.adapters.remove(number)
    del own
    ranks.runner.adapters.exchange()
    assert held(ranks) == [([], 0)]


def test_what_is_said_of_an_adapter_has_a_bound_and_ends_no_rank(adapters, ranks, monkeypatch):
    """A file of a user may have names of megabytes, and errors of libraries quote what they were given."""
    theirs = ranks.followers[0]._adapters._own

    def refuse(*_):
        raise ModelCorruptError("x" * (2 << 20))

    with monkeypatch.context() as changed:
        changed.setattr(theirs, "read", refuse)
        with pytest.raises(QuireServerError, match=r"^Rank 1: x{1000}\.\.\.$"):
            read_by_all(ranks, 21, adapters[1])
    read_by_all(ranks, 22, adapters[1])
    ranks.runner.adapters.exchange()


def test_what_one_rank_cannot_read_is_loaded_by_none(adapters, ranks, monkeypatch):
    theirs = ranks.followers[0]._adapters._own
    ranks.runner.adapters.add(7, read_by_all(ranks, 7, adapters[0]))
    before = held(ranks)
    with monkeypatch.context() as changed:
        changed.setattr(theirs.room, "limit", 0)
        with pytest.raises(QuireServerError, match=r"^Rank 1: The adapter takes .* resources.memory"):
            read_by_all(ranks, 8, adapters[1])
        changed.undo()
        read = theirs.read
        changed.setattr(theirs, "read", lambda *given: replace(read(*given), digest="another"))
        with pytest.raises(QuireServerError, match="Rank 1 has read another content"):
            read_by_all(ranks, 9, adapters[1])
    with pytest.raises(QuireServerError, match="adapter_config.json"):
        read_by_all(ranks, 10, adapters[1].parent / "none")
    ranks.runner.adapters.exchange()
    assert held(ranks) == before
    read_by_all(ranks, 11, adapters[1])  # and it can be tried again
    ranks.runner.adapters.remove(7)
    ranks.runner.adapters.exchange()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rounded_layers_have_adapters_beside_them(model, adapters, quantization):
    runner = with_adapters(load(model, quantization=quantization, max_adapters=3), adapters)
    plain = load(model, quantization=quantization)
    (found,) = answers(runner, num_adapter_slots=3)
    base = InProcessEngine(plain).generate([PROMPTS[1]], greedy(LENGTH))[0]
    assert found[1] == base and len({tuple(one) for one in found}) == len(PROMPTS)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"new_thing": 1}, "new_thing"),
        ({"use_rslora": 1}, "use_rslora is 1"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"r": 65}, "r is 65"),
        ({"r": 3}, "another model"),
        ({"lora_alpha": "8"}, "lora_alpha"),
        ({"alpha": 10**400}, "lora_alpha is 1000"),
        ({"alpha": math.nan}, "lora_alpha is NaN"),
        ({"rank": 32}, "--max-adapter-rank"),
        ({"targets": ("embed_tokens",)}, "embed_tokens"),
    ],
)
def test_what_would_be_computed_differently_is_refused_by_name(model, tmp_path, change, reason):
    adapters = load(model, max_adapters=1).adapters
    directory = adapter_files.write(tmp_path / "adapter", model, **change)
    with pytest.raises(QuireServerError, match=reason):
        adapters.read(directory)


def test_numbers_that_the_models_type_does_not_hold_are_refused(model, tmp_path):
    directory = adapter_files.write(tmp_path / "adapter", model, alpha=1e6)
    matrices = load(model, max_adapters=1).adapters.matrices
    room = HostRoom(1 << 20)
    assert adapter_file.read(directory, matrices, 16, torch.float32, room).rank == 4
    for _ in range(200):  # and what it would have taken is free
        with pytest.raises(QuireServerError, match="not finite numbers in float16"):
            adapter_file.read(directory, matrices, 16, torch.float16, room)


def limited(model, monkeypatch, available, **options):
    """The adapters of a server that has so many bytes left beside the model."""
    monkeypatch.setattr(kv_cache, "available_bytes", lambda: available)
    options = {"num_blocks_override": 128, "kv_cache_memory_bytes": None, **options}
    return load(model, max_adapters=2, **options).adapters


def test_adapters_together_take_a_quarter_of_the_memory_that_is_left(model, adapters, monkeypatch):
    size = load(model, max_adapters=1).adapters.read(adapters[0]).size
    slots = 2 * load(model, max_adapters=1).adapters.slot_bytes
    loaded = limited(model, monkeypatch, slots + 4 * 2 * size)
    kept = [loaded.read(adapters[0]), loaded.read(adapters[0])]
    with pytest.raises(QuireServerError) as refused:
        loaded.read(adapters[0])
    for remedy in ("drop others", "engine.maxAdapterRank", "resources.memory"):
        assert remedy in str(refused.value)
    loaded.add(1, kept.pop())
    replaced = loaded.begin(2, adapters[0], replaces=1).result()  # one that is dropped then counts as free
    assert replaced.size == size
    with pytest.raises(QuireServerError, match="are left"):
        loaded.begin(3, adapters[0]).result()
    loaded.remove(1)
    del replaced
    assert loaded.read(adapters[0]).size == size


def test_the_rest_is_shared_with_the_tiers_and_a_cache_of_a_given_size(model, monkeypatch):
    slots = 2 * load(model, max_adapters=1).adapters.slot_bytes
    taken = {"kv_offload_host_bytes": 3 << 20, "kv_cache_memory_bytes": 5 << 20}
    loaded = limited(model, monkeypatch, slots + (12 << 20), num_blocks_override=None, **taken)
    assert loaded.room.limit == 1 << 20
    assert limited(model, monkeypatch, slots // 2).room.limit == 0


def test_what_has_no_room_is_refused_before_a_weight_is_read(model, adapters, monkeypatch):
    loaded = limited(model, monkeypatch, 0)
    monkeypatch.setattr(weights, "read", None)
    with pytest.raises(QuireServerError, match="are left"):
        loaded.read(adapters[0])


def test_a_pickle_is_not_read(model, tmp_path):
    directory = adapter_files.write(tmp_path / "adapter", model)
    (directory / "adapter_model.safetensors").rename(directory / "adapter_model.bin")
    with pytest.raises(QuireServerError, match="pickle"):
        load(model, max_adapters=1).adapters.read(directory)


@pytest.mark.deep
def test_a_real_model_has_the_tokens_of_its_merged_models(tmp_path):
    model, prompts = models.smollm2(), PROMPTS[:3]
    directories = [
        adapter_files.write(tmp_path / str(seed), model, seed=seed, rank=8, alpha=4.0, scale=0.03)
        for seed in (1, 2)
    ]
    options = {"max_model_len": 256, "max_num_seqs": 4}
    expected = [
        InProcessEngine(load(one, **options)).generate([prompt], greedy(LENGTH))[0]
        for prompt, one in zip(
            prompts,
            [model, *(adapter_files.merged(model, one, tmp_path / f"m{one.name}") for one in directories)],
            strict=True,
        )
    ]
    runner = with_adapters(load(model, max_adapters=2, **options), directories)
    base = InProcessEngine(runner).generate(prompts, greedy(LENGTH))
    assert mixed(runner, prompts) == expected and base[0] == expected[0] and base[1] != expected[1]
    ranks = Ranks(model, 3, max_adapters=2, num_blocks_override=64, **options)
    for number, directory in enumerate(directories, start=1):
        ranks.runner.adapters.add(number, read_by_all(ranks, number, directory))
    assert mixed(ranks.runner, prompts) == expected
    ranks.close()


def mixed(runner, prompts):
    """The tokens of prompts at once: of the model itself, of adapter 1, of adapter 2 ..."""
    engine = InProcessEngine(runner, num_adapter_slots=2)
    tokens: list[list[int]] = [[] for _ in prompts]
    for index, prompt in enumerate(prompts):
        request = Request(str(index), tuple(prompt), greedy(LENGTH), arrival=0.0)
        engine.scheduler.add(request, adapter=index, adapter_key=str(index))
    while (step := engine.scheduler.schedule()) is not None:
        for event in engine.scheduler.commit(step, runner.run(step)):
            tokens[int(event.request_id)] += event.token_ids
    return tokens
