"""Stages of a pipeline give the answers of one stage, with several steps in flight: the runners and the
connection between them, with ranks as threads.
"""

import pytest

from quire_server.core.config import PreemptionMode, SpeculationConfig, SpeculativeMethod
from quire_server.core.sampling_params import SamplingParams
from quire_server.core.step import NOT_FINITE, OUT_OF_MEMORY
from quire_server.errors import RankLostError
from quire_server.layers.parallel import CollectiveError
from tests.server.engine.test_ranks import PROMPTS
from tests.server.models import families
from tests.server.runner.in_process import InProcessEngine, greedy, load
from tests.server.runner.pipelined import PipelinedEngine
from tests.server.runner.ranks_in_process import Ranks, lack_memory

OPTIONS = {"num_blocks_override": 200, "quantization": "none", "kv_offload_host_bytes": 1 << 20}
SAMPLING = [
    greedy(20, logprobs=3),
    greedy(20, prompt_logprobs=2),
    SamplingParams(20, temperature=1.0, seed=5, ignore_eos=True),
    greedy(20, logit_bias=((99, 100.0),)),  # one token again and again: drafts are right
    greedy(20, presence_penalty=1.0),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "layers"
    families.build(path, "Llama", {"num_hidden_layers": 5, "vocab_size": 260, "max_position_embeddings": 512})
    return path


@pytest.fixture(scope="module")
def whole(directory):
    return load(directory, **OPTIONS)


@pytest.fixture(scope="module")
def pair(directory):
    found = Ranks(directory, 2, **OPTIONS)
    yield found
    found.close()


@pytest.fixture(params=[(1, 2), (1, 3), (2, 3)], ids=["2 stages", "3 stages", "2 ranks in 3 stages"])
def ranks(directory, request):
    found = Ranks(directory, *request.param, **OPTIONS)
    found.tensor, found.stages = request.param
    yield found
    found.close()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 3},
        {"num_blocks": 16},
        {"num_blocks": 16, "num_host_slots": 16, "preemption_mode": PreemptionMode.SWAP},
        {"speculation": SpeculationConfig(SpeculativeMethod.NGRAM, 4, lookup_min=1)},
    ],
    ids=["alone", "chunks", "preemption", "swapped", "drafts"],
)
def test_equal_batches_have_equal_bits(whole, pair, ranks, limits):
    """One step at a time, so that all steps are the same as with one stage."""
    reference = InProcessEngine(whole if ranks.tensor == 1 else pair.runner, **limits)
    divided = InProcessEngine(ranks.runner, **limits)
    for _ in range(2):  # the second time with prefix hits
        assert divided.generate(PROMPTS, SAMPLING) == reference.generate(PROMPTS, SAMPLING)
        assert divided.logprobs == reference.logprobs
        assert divided.prompt_logprobs == reference.prompt_logprobs
    assert "num_blocks" not in limits or divided.scheduler.stats.preemptions > 0


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "limits",
    [{}, {"max_num_batched_tokens": 16, "max_num_seqs": 6}, {"num_blocks": 16}],
    ids=["alone", "chunks", "preemption"],
)
def test_steps_in_flight_change_no_answer(whole, ranks, limits):
    expected = [
        InProcessEngine(whole).generate([prompt], one)[0]
        for prompt, one in zip(PROMPTS, SAMPLING, strict=True)
    ]
    engine = PipelinedEngine(ranks.runner, ranks.stages, **limits)
    for _ in range(2):
        assert engine.generate(PROMPTS, SAMPLING) == expected
    assert engine.most_in_flight == ranks.stages
    assert len(engine.prompt_logprobs["1"]) == len(PROMPTS[1]) - 1 or engine.prompt_logprobs["1"]
    assert "num_blocks" not in limits or engine.scheduler.stats.preemptions > 0


def test_a_row_that_is_aborted_in_flight_gives_nothing_to_the_next_request(whole, ranks):
    expected = [InProcessEngine(whole).generate([prompt], greedy(12))[0] for prompt in PROMPTS]
    engine = PipelinedEngine(ranks.runner, ranks.stages, max_num_seqs=4)
    for number, prompt in enumerate(PROMPTS[:3]):
        engine.add(str(number), prompt, greedy(12))
    for round_ in range(6):
        engine.step()
        engine.scheduler.abort(f"a{round_ - 1}" if round_ else "2")
        engine.add(f"a{round_}", PROMPTS[3], greedy(12, presence_penalty=1.0))
    assert engine.num_in_flight == ranks.stages - 1
    engine.add("4", PROMPTS[4], greedy(12))
    engine.drain()
    assert [engine.tokens[name] for name in ("0", "1", "4")] == [expected[0], expected[1], expected[4]]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("place", ["before the pass", "within the pass"])
@pytest.mark.parametrize("stage", [0, -1])
def test_a_stage_without_memory_fails_one_request_and_no_other_step(whole, ranks, monkeypatch, stage, place):
    expected = [InProcessEngine(whole).generate([prompt], greedy(12))[0] for prompt in PROMPTS]
    model = ranks.models[0 if stage == 0 else ranks.tensor * (ranks.stages - 1)]
    failed = lack_memory(monkeypatch, model, place, layer=0, more_than=85)
    engine = PipelinedEngine(ranks.runner, ranks.stages)
    for name, prompt in enumerate(PROMPTS):
        engine.add(str(name), prompt, greedy(12))
    engine.step()
    engine.add("5", [9] * 90, greedy(12))
    engine.drain()
    assert failed, "the allocation failed for real"
    assert engine.errors == {"5": OUT_OF_MEMORY}
    assert [engine.tokens[str(name)] for name in range(5)] == expected


def test_a_last_stage_that_ends_before_it_sends_its_answer_is_named(ranks, monkeypatch):
    last = ranks.tensor * (ranks.stages - 1)

    def lost(*_):
        ranks.channels[last].close()
        raise CollectiveError("the last stage sent nothing")

    monkeypatch.setattr(ranks.exchange.communicators[0], "recv", lost)
    engine = PipelinedEngine(ranks.runner, ranks.stages)
    engine.add("0", PROMPTS[0], greedy(2))
    with pytest.raises(RankLostError, match=f"not echoed by rank {last} "):
        engine.drain()


def test_blocks_that_held_nan_are_zeroed_on_every_rank(whole, ranks):
    expected = InProcessEngine(whole).generate(PROMPTS, greedy(12))
    norms = [model.layers[0].input_norm.weight for model in ranks.models]
    saved = [weight[0].item() for weight in norms]
    for weight in norms:
        weight[0] = float("nan")
    engine = PipelinedEngine(ranks.runner, ranks.stages)
    engine.add("nan", range(90), greedy(12))
    engine.drain()
    assert engine.errors == {"nan": NOT_FINITE}
    for weight, value in zip(norms, saved, strict=True):
        weight[0] = value
    assert PipelinedEngine(ranks.runner, ranks.stages).generate(PROMPTS, greedy(12)) == expected


def test_the_cache_has_the_same_number_of_blocks_on_every_stage_and_the_bytes_that_were_given(directory):
    found = Ranks(directory, 1, 3, num_blocks_override=None, kv_cache_memory_bytes=1 << 20, max_num_seqs=256)
    try:
        one = load(directory, quantization="none", kv_cache_memory_bytes=1 << 20, max_num_seqs=256)
        held = [found.runner.kv_cache_bytes]
        held += [sum(cache.nbytes for cache in each._executor._kv_caches) for each in found.followers]
        assert found.runner.num_blocks == one.num_blocks
        assert sum(held) == one.kv_cache_bytes <= 1 << 20
    finally:
        found.close()
