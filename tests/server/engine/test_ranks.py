"""Ranks that divide a model give the answers of one rank, whatever a step has: the runners and the connection
between them, with ranks as threads.
"""

import socket
from dataclasses import replace

import pytest

from quire_server.core.config import Batching, PreemptionMode, SpeculationConfig, SpeculativeMethod
from quire_server.core.policy import Policy
from quire_server.core.rank_step import NO_WORK, Echo, EchoStatus, RankLimits, RankStep
from quire_server.core.request import Request
from quire_server.core.sampling_params import SamplingParams
from quire_server.core.step import NOT_FINITE, OUT_OF_MEMORY, Step
from quire_server.core.watermark import Watermark
from quire_server.engine import rank, step_codec
from quire_server.engine.rank_channel import Channel
from quire_server.engine.rank_group import RankGroup
from quire_server.errors import RankLostError
from quire_server.layers.parallel import CollectiveError
from tests.server.runner.in_process import InProcessEngine, greedy, load
from tests.server.runner.ranks_in_process import Ranks, lack_memory
from tests.server.tiny_model import write

PROMPTS = [[(7 * i + 3 * j) % 250 for j in range(20 + 9 * i)] for i in range(5)]


def options(directory):
    """All tiers, and a draft model that is the model itself, so that its drafts are right."""
    return {
        "num_blocks_override": 200,
        "quantization": "none",
        "kv_offload_host_bytes": 1 << 20,
        "kv_offload_disk_path": directory,
        "kv_offload_disk_bytes": 1 << 20,
        "speculative_model": directory,
        "watermark": Watermark(b"a key of some length"),
    }


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def whole(directory):
    runner = load(directory, **options(directory))
    yield runner
    runner.close()


@pytest.fixture(scope="module", params=[2, 4])
def ranks(directory, request):
    """The model has 4 heads, and 2 of keys and values."""
    found = Ranks(directory, request.param, **options(directory))
    yield found
    found.close()


CONDITIONS = {
    "alone": {},
    "chunks of 7": {"max_num_batched_tokens": 16, "max_num_seqs": 3},
    "preemption": {"num_blocks": 16},
    "preemption, swapped": {
        "num_blocks": 16,
        "num_host_slots": 16,
        "preemption_mode": PreemptionMode.SWAP,
    },
    "shortest job first": {"policy": Policy.SJF, "max_num_seqs": 2},
    "static batches": {"batching": Batching.STATIC, "max_num_seqs": 2},
    "drafts from the prompt": {"speculation": SpeculationConfig(SpeculativeMethod.NGRAM, 4, lookup_min=1)},
    "drafts of a draft model": {"speculation": SpeculationConfig(SpeculativeMethod.DRAFT_MODEL, 3)},
    "drafts of a draft model, in chunks, swapped": {
        "speculation": SpeculationConfig(SpeculativeMethod.DRAFT_MODEL, 3),
        "max_num_batched_tokens": 32,
        "max_num_seqs": 4,
        "num_blocks": 12,
        "num_host_slots": 16,
        "preemption_mode": PreemptionMode.SWAP,
    },
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("condition", CONDITIONS)
def test_ranks_give_the_tokens_and_logprobs_of_one_rank(whole, ranks, condition):
    limits = CONDITIONS[condition]
    sampling = [
        greedy(20, logprobs=3),
        greedy(20, prompt_logprobs=2),
        SamplingParams(20, temperature=1.0, seed=5, ignore_eos=True),
        greedy(20, logit_bias=((99, 100.0),)),  # one token again and again: drafts are right
        greedy(20, presence_penalty=1.0, bad_words=((97,), (5, 6)), watermark=True),
    ]
    reference, divided = InProcessEngine(whole, **limits), InProcessEngine(ranks.runner, **limits)
    for _ in range(2):  # the second time with prefix hits
        expected = reference.generate(PROMPTS, sampling)
        assert divided.generate(PROMPTS, sampling) == expected
        for kind in ("logprobs", "prompt_logprobs"):
            ours, theirs = getattr(divided, kind), getattr(reference, kind)
            for name, entries in theirs.items():
                assert [one.token_id for one in ours[name]] == [one.token_id for one in entries]
                assert [one.logprob for one in ours[name]] == pytest.approx(
                    [one.logprob for one in entries], abs=1e-3
                )
    stats, kv = divided.scheduler.stats, divided.scheduler.kv.stats()
    assert ("num_blocks" in limits) == (stats.preemptions > 0)
    assert ("preemption_mode" in limits) == (kv.swaps > 0)
    assert ("speculation" in limits) == (stats.speculation.accepted_tokens > 10)


def drain(engine):
    """(tokens by request, errors by request)."""
    tokens, errors = {}, {}
    while (step := engine.scheduler.schedule()) is not None:
        for event in engine.scheduler.commit(step, engine.runner.run(step)):
            tokens.setdefault(event.request_id, []).extend(event.token_ids)
            if event.error is not None:
                errors[event.request_id] = event.error
    engine.scheduler.check()
    return tokens, errors


@pytest.mark.one_in(3)
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("place", ["before the pass", "within the pass"])
def test_when_one_rank_has_no_memory_all_ranks_drop_the_same_request(
    whole, ranks, monkeypatch, number, place
):
    expected = [InProcessEngine(whole).generate([prompt], greedy(12))[0] for prompt in PROMPTS]
    failed = lack_memory(monkeypatch, ranks.models[number], place, layer=1, more_than=200)
    engine = InProcessEngine(ranks.runner)
    for name, prompt in enumerate([*PROMPTS, [9] * 90]):
        engine.scheduler.add(Request(str(name), tuple(prompt), greedy(12), 0.0))
    tokens, errors = drain(engine)
    assert failed, "the allocation failed for real"
    assert errors == {"5": OUT_OF_MEMORY}
    assert [tokens[str(name)] for name in range(5)] == expected


def test_blocks_that_held_nan_are_zeroed_on_every_rank(whole, ranks):
    expected = InProcessEngine(whole).generate(PROMPTS, greedy(12))
    norms = [model.layers[0].input_norm.weight for model in ranks.models]
    for weight in norms:
        weight[0] = float("nan")
    engine = InProcessEngine(ranks.runner)
    engine.scheduler.add(Request("nan", tuple(range(90)), greedy(12), 0.0))
    assert drain(engine)[1] == {"nan": NOT_FINITE}
    for weight in norms:
        weight[0] = 1.0
    assert InProcessEngine(ranks.runner).generate(PROMPTS, greedy(12)) == expected


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda echo: replace(echo, digest=echo.digest ^ 1), "executed another step"),
        (lambda echo: replace(echo, sequence=echo.sequence + 1), "executed another step"),
        (None, "not echoed by rank 1 of 2"),
    ],
)
def test_a_rank_that_diverges_or_stays_silent_is_named(answer, message):
    near, far = socket.socketpair()
    lost = []
    group = RankGroup({1: Channel(near)}, lost.append, deadline=0.1)
    group.send(RankStep(Step(1, (), (), (), (), (), ())))
    if answer is not None:
        right = Echo(group._encoder.sequence, group._encoder.digest)
        Channel(far).send(step_codec.encode_echo(answer(right)))
    with pytest.raises(RankLostError, match=message):
        group.collect()
    assert lost == ([] if answer else [1])
    near.close()
    far.close()


def test_a_rank_prepares_the_next_token_of_each_row_before_its_message(ranks, monkeypatch):
    executor, prepared, launched = ranks.followers[0]._executor, [], []
    prepare, launch = executor.prepare, executor.launch
    monkeypatch.setattr(executor, "prepare", lambda layout: (prepared.append(layout), prepare(layout)))
    monkeypatch.setattr(
        executor, "launch", lambda step, layout, *rest, **more: (
            launched.append(layout), launch(step, layout, *rest, **more)
        )[1]
    )  # fmt: skip
    InProcessEngine(ranks.runner).generate(PROMPTS[:2], greedy(6))
    assert [any(layout is each for each in prepared) for layout in launched] == [False] * 2 + [True] * 4


def test_an_exchange_that_fails_on_all_ranks_is_an_error_of_rank_0(directory, monkeypatch):
    """With ranks of its own, which can exchange nothing afterwards."""

    def lost(part):
        raise CollectiveError("the other rank did not arrive")

    ranks = Ranks(directory, 2, **options(directory))
    for communicator in ranks.exchange.communicators:
        monkeypatch.setattr(communicator, "all_reduce", lost)
    with pytest.raises(CollectiveError, match="did not arrive"):
        InProcessEngine(ranks.runner).generate(PROMPTS[:1], greedy(2))
    ranks.runner.close()
    ranks.close()


def test_a_rank_that_lost_an_exchange_and_hears_nothing_more_names_rank_0(monkeypatch):
    monkeypatch.setattr(rank, "_LEADER_SECONDS", 0.05)

    class Lost:
        limits, work = RankLimits(1, 1, 0, 0, 8, 8), NO_WORK

        def execute(self, message):
            return EchoStatus.LOST_PEER, None

        def prepare(self):
            pass

        def adapter_reports(self):
            return ()

    near, far = socket.socketpair()
    with near, far:
        RankGroup({1: Channel(near)}).send(RankStep(Step(1, (), (), (), (), (), ())))
        with pytest.raises(RankLostError, match="Rank 0 did not take part in step"):
            rank.follow(Channel(far), Lost())
