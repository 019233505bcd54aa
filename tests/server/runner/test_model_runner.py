"""Sampling parameters of requests, failures limited to one request, and settings that cannot work."""

import random
from pathlib import Path

import pytest
import torch

from quire_server.core.request import FinishReason, Request
from quire_server.core.sampling_params import SamplingParams
from quire_server.errors import ConfigError, ModelNotFoundError
from quire_server.runner import kv_cache
from quire_server.runner.model_runner import ModelRunner
from tests.server.runner.in_process import InProcessEngine, greedy, load

PROMPTS = [[random.Random(i).randrange(2, 211) for _ in range(3 + i * 2 % 23)] for i in range(24)]
SAMPLING = [
    SamplingParams(
        12,
        temperature=(0.0, 0.7, 1.5)[i % 3],
        top_k=(0, 5, 0, 40)[i % 4],
        top_p=(1.0, 0.9)[i % 2],
        seed=i,
        ignore_eos=True,
        min_p=(0.0, 0.05)[i % 5 == 1],
        repetition_penalty=(1.0, 1.2)[i % 6 == 2],
        presence_penalty=(0.0, 0.6)[i % 6 == 3],
        frequency_penalty=(0.0, -0.4)[i % 6 == 4],
        logit_bias=((5, 2.0), (9, -50.0)) if i % 7 == 3 else (),
        bad_words=((5,), (7, 8)) if i % 7 == 4 else (),
        allowed_token_ids=tuple(range(2, 150)) if i % 7 == 5 else (),
        logprobs=2 if i % 5 == 0 else None,
        prompt_logprobs=1 if i % 11 == 0 else None,
    )
    for i in range(24)
]


@pytest.fixture(scope="module")
def runner(directory: Path) -> ModelRunner:
    return load(directory)


@pytest.fixture(scope="module")
def alone(runner: ModelRunner) -> list[list[int]]:
    """Each prompt by itself, which is what it must get beside others too."""
    return [
        InProcessEngine(runner).generate([prompt], sampling)[0]
        for prompt, sampling in zip(PROMPTS, SAMPLING, strict=True)
    ]


@pytest.mark.parametrize(
    "condition",
    [{}, {"max_num_batched_tokens": 5}, {"num_blocks": 6, "max_model_len": 64}],
    ids=["together", "chunks", "preemption"],
)
def test_many_distinct_sampled_prompts_get_the_answers_that_they_get_alone(
    runner: ModelRunner, alone: list[list[int]], condition: dict[str, object]
) -> None:
    engine = InProcessEngine(runner, **condition)
    assert engine.generate(PROMPTS, SAMPLING) == alone
    assert len({tuple(answer) for answer in alone}) == len(alone)


def test_aborted_neighbours_leave_no_trace(runner: ModelRunner, alone: list[list[int]]) -> None:
    engine = InProcessEngine(runner, num_blocks=12, max_model_len=64)
    for i, prompt in enumerate(PROMPTS):
        engine.scheduler.add(Request(f"victim{i}", tuple(prompt), SAMPLING[i], 0.0))
    for i in range(len(PROMPTS)):
        step = engine.scheduler.schedule()
        assert step is not None
        engine.scheduler.commit(step, engine.runner.run(step))
        engine.scheduler.abort(f"victim{i}")
        engine.scheduler.check()
    assert engine.generate(PROMPTS, SAMPLING) == alone


def test_another_seed_gives_another_answer_and_the_same_seed_the_same(runner: ModelRunner) -> None:
    engine = InProcessEngine(runner)
    hot = [SamplingParams(12, temperature=1.5, seed=seed, ignore_eos=True) for seed in (1, 2, 1)]
    first, second, third = engine.generate([PROMPTS[0]] * 3, hot)
    assert first == third != second


def test_top_k_one_and_tiny_temperature_are_greedy(runner: ModelRunner) -> None:
    engine = InProcessEngine(runner)
    (expected,) = engine.generate([PROMPTS[3]], greedy(10))
    for sampling in (
        SamplingParams(10, temperature=2.0, top_k=1, ignore_eos=True),
        SamplingParams(10, temperature=1e-9, ignore_eos=True),
        SamplingParams(10, temperature=1.0, top_p=1e-9, ignore_eos=True),
    ):
        assert engine.generate([PROMPTS[3]], sampling) == [expected]


def test_min_tokens_keeps_stop_tokens_from_being_sampled(runner: ModelRunner) -> None:
    engine = InProcessEngine(runner)
    (free,) = engine.generate([PROMPTS[3]], greedy(8))
    stop = SamplingParams(8, temperature=0.0, ignore_eos=True, stop_token_ids=(free[0],))
    assert engine.generate([PROMPTS[3]], stop) == [free[:1]]
    assert engine.last["0"].finish_reason is FinishReason.STOP
    later = SamplingParams(8, temperature=0.0, ignore_eos=True, stop_token_ids=(free[0],), min_tokens=3)
    (answer,) = engine.generate([PROMPTS[3]], later)
    assert free[0] not in answer[:3]


def test_logprobs_are_of_the_models_own_distribution_for_drawn_tokens_too(runner: ModelRunner) -> None:
    engine = InProcessEngine(runner)
    cold = SamplingParams(3, temperature=0.3, seed=4, ignore_eos=True, logprobs=211)
    (answer,) = engine.generate([PROMPTS[5]], cold)
    assert [entry.token_id for entry in engine.logprobs["0"]] == answer
    for entry in engine.logprobs["0"]:
        assert dict(entry.top)[entry.token_id] == entry.logprob
        total = torch.tensor([value for _, value in entry.top]).exp().sum()
        torch.testing.assert_close(total, torch.tensor(1.0))


def test_a_row_with_nan_logits_fails_alone_and_its_blocks_are_reused(directory: Path) -> None:
    runner = load(directory, max_num_seqs=4)
    poisoned = PROMPTS[0][0]
    runner._model.embedding[poisoned] = float("nan")  # no public way to damage a model
    head = runner._model.head
    head.weight = head.weight.nan_to_num()  # tied; only the poisoned prompt must fail
    engine = InProcessEngine(runner, max_num_seqs=4, num_blocks=8)
    clean = [prompt for prompt in PROMPTS if poisoned not in prompt][:3]
    expected = engine.generate(clean, greedy(6))
    assert not any(poisoned in answer for answer in expected)
    engine.scheduler.add(Request("bad", tuple(PROMPTS[0]), greedy(6), 0.0))
    for i, prompt in enumerate(clean):
        engine.scheduler.add(Request(str(i), tuple(prompt), greedy(6), 0.0))
    tokens: dict[str, list[int]] = {}
    errors = []
    while (step := engine.scheduler.schedule()) is not None:
        for event in engine.scheduler.commit(step, runner.run(step)):
            tokens.setdefault(event.request_id, []).extend(event.token_ids)
            errors += [event] if event.error else []
    assert [event.request_id for event in errors] == ["bad"]
    assert [tokens[str(i)] for i in range(3)] == expected
    assert engine.generate(clean, greedy(6)) == expected


def test_a_failed_row_does_not_zero_the_blocks_that_it_shares(directory: Path) -> None:
    runner = load(directory, max_num_seqs=4)
    poisoned = 7
    runner._model.embedding[poisoned] = float("nan")
    runner._model.head.weight = runner._model.head.weight.nan_to_num()
    size = runner._input_batch.block_size
    prefix = list(range(10, 10 + 2 * size))
    engine = InProcessEngine(runner, max_num_seqs=4, num_blocks=16)
    (expected,) = engine.generate([[*prefix, 8]], greedy(8))
    assert poisoned not in expected
    engine.scheduler.add(Request("good", (*prefix, 8), greedy(8), 0.0))
    engine.scheduler.add(Request("bad", (*prefix, poisoned), greedy(8), 0.0))
    tokens: dict[str, list[int]] = {"good": [], "bad": []}
    errors = []
    while (step := engine.scheduler.schedule()) is not None:
        for event in engine.scheduler.commit(step, runner.run(step)):
            tokens[event.request_id].extend(event.token_ids)
            errors += [event.request_id] if event.error else []

    assert errors == ["bad"]
    assert tokens["good"] == expected
    assert engine.generate([[*prefix, 8]], greedy(8)) == [expected]


def test_bfloat16_runs_if_requested(directory: Path) -> None:
    runner = load(directory, dtype="bfloat16")
    assert runner.dtype == "bfloat16"
    assert len(InProcessEngine(runner).generate(PROMPTS[:3], greedy(5))) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda", "dtype": "auto"}, "There is no CUDA device"),
        ({"device": "cuda", "dtype": "float32"}, "--dtype float32 is for --device cpu"),
        ({"dtype": "int3"}, "supported: auto"),
        ({"max_model_len": 257}, "256 positions"),
        ({"kv_cache_memory_bytes": 10}, "room for no block"),
        ({"kv_cache_memory_bytes": 100_000, "max_model_len": 256}, "less than max-model-len"),
    ],
)
def test_settings_that_cannot_work_say_what_to_do(
    directory: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(directory, **options)


def test_the_context_is_limited_to_the_cache_unless_max_model_len_is_set(directory: Path) -> None:
    runner = load(directory, num_blocks_override=4)
    assert (runner.num_blocks, runner.max_model_len) == (4, 64)


def test_a_missing_model_is_not_found(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(ModelNotFoundError):
            load(path)


def test_available_memory_is_what_the_cgroup_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "limit").write_text("1000\n")
    (tmp_path / "usage").write_text("700\n")
    (tmp_path / "stat").write_text("anon 400\ninactive_file 300\n")
    group = kv_cache._Cgroup(tmp_path / "limit", tmp_path / "usage", tmp_path / "stat", "inactive_file")
    monkeypatch.setattr(kv_cache, "_CGROUPS", [group])
    assert kv_cache.available_bytes() == 600  # file pages of a model just read can be dropped
    (tmp_path / "limit").write_text("max\n")
    assert kv_cache.available_bytes() > 1000
