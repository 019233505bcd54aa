"""Drafts, by n-grams or by a draft model, change the speed of an answer and never its tokens, greedy or
sampled.
"""

import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quire_server.core.config import PreemptionMode, SpeculationConfig, SpeculativeMethod
from quire_server.core.request import FinishReason, Request
from quire_server.core.sampling_params import SamplingParams
from quire_server.core.step import NOTHING_ALLOWED
from quire_server.errors import ConfigError
from quire_server.runner.model_runner import ModelRunner
from tests.server.models import families
from tests.server.runner.in_process import InProcessEngine, greedy, load

LENGTH = 40
NGRAM = SpeculationConfig(SpeculativeMethod.NGRAM, 5, lookup_min=1)
DRAFT_MODEL = SpeculationConfig(SpeculativeMethod.DRAFT_MODEL, 4)
CIRCUMSTANCES: dict[str, dict[str, object]] = {
    "all together": {},
    "one at a time": {"max_num_seqs": 1},
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 5},
    "no room for drafts": {"max_num_batched_tokens": 1},
    "whole prompts, no prefix cache": {"enable_chunked_prefill": False, "enable_prefix_caching": False},
    "preemption": {"num_blocks": 9, "max_model_len": 130},
    "swap": {
        "num_blocks": 9,
        "max_model_len": 130,
        "num_host_slots": 48,
        "preemption_mode": PreemptionMode.SWAP,
    },
    "prefixes from the host": {"num_blocks": 9, "max_model_len": 130, "num_host_slots": 48},
}
SAMPLING = [
    SamplingParams(
        LENGTH,
        temperature=(0.0, 0.02, 1.0, 0.02)[i % 4],
        top_k=(0, 5, 0, 40)[i % 4],
        top_p=(1.0, 0.9)[i % 2],
        seed=i,
        ignore_eos=True,
        logprobs=2 if i % 5 == 0 else None,
    )
    for i in range(14)
]


def prompts() -> list[list[int]]:
    """Repetitive ones, open ones, and ones with a common prefix."""
    rng = random.Random(3)
    shared = [rng.randrange(2, 211) for _ in range(48)]
    own = [[rng.randrange(2, 211) for _ in range(length)] for length in (1, 2, 15, 16, 33)]
    cycles = [(own[2] * 4)[:length] for length in (17, 31, 50)]
    return own + cycles + [shared[:cut] + own[4][:5] for cut in (16, 31, 48)] + [shared, shared, own[4] * 2]


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[list[int]]:
    model = LlamaForCausalLM.from_pretrained(directory)
    return families.answers(model, prompts(), LENGTH)


@pytest.fixture(scope="module")
def runner(directory: Path) -> ModelRunner:
    """Its draft model is itself, in int8 if the machine has kernels for it: mostly right."""
    return load(directory, speculative_model=directory, kv_offload_host_bytes=2 << 20)


@pytest.fixture(scope="module")
def wrong_draft(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    """Its draft model is unrelated: mostly wrong."""
    other = tmp_path_factory.mktemp("other")
    families.make(other, "Llama, one kv head, biases")
    return load(directory, speculative_model=other)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("speculation", [NGRAM, DRAFT_MODEL], ids=["n-gram", "draft model"])
@pytest.mark.parametrize("circumstance", CIRCUMSTANCES.values(), ids=CIRCUMSTANCES)
def test_greedy_answers_are_those_of_transformers(
    runner: ModelRunner,
    expected: list[list[int]],
    speculation: SpeculationConfig,
    circumstance: dict[str, object],
) -> None:
    engine = InProcessEngine(runner, speculation=speculation, **circumstance)
    assert engine.generate(prompts(), greedy(LENGTH)) == expected
    assert engine.generate(prompts()[-3:], greedy(LENGTH)) == expected[-3:]
    stats = engine.scheduler.stats
    assert ("num_blocks" in circumstance) == (stats.preemptions > 0)
    has_room = circumstance.get("max_num_batched_tokens") != 1
    assert has_room == (stats.speculation.accepted_tokens > 0)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("speculation", [NGRAM, DRAFT_MODEL], ids=["n-gram", "draft model"])
@pytest.mark.parametrize("num_blocks", [256, 9])
def test_a_seed_gives_the_same_answer_with_and_without_drafts(
    runner: ModelRunner, speculation: SpeculationConfig, num_blocks: int
) -> None:
    plain, drafted = (
        InProcessEngine(runner),
        InProcessEngine(runner, speculation=speculation, num_blocks=num_blocks, max_model_len=130),
    )
    answers = plain.generate(prompts(), SAMPLING)
    assert drafted.generate(prompts(), SAMPLING) == answers
    assert drafted.scheduler.stats.speculation.accepted_tokens > 0
    for name, entries in drafted.logprobs.items():
        assert [entry.token_id for entry in entries] == [entry.token_id for entry in plain.logprobs[name]]
        for ours, theirs in zip(entries, plain.logprobs[name], strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_a_wrong_draft_model_changes_no_answer_and_is_soon_disabled(
    wrong_draft: ModelRunner, expected: list[list[int]]
) -> None:
    engine = InProcessEngine(wrong_draft, speculation=DRAFT_MODEL)
    assert engine.generate(prompts(), greedy(LENGTH)) == expected
    stats = engine.scheduler.stats.speculation
    assert 0 < stats.draft_tokens < 0.25 * len(expected) * LENGTH
    assert stats.pauses >= len(expected)


def test_a_good_draft_model_yields_several_tokens_per_step(runner: ModelRunner) -> None:
    engine = InProcessEngine(runner, speculation=DRAFT_MODEL)
    engine.generate(prompts()[:1], greedy(100))
    stats = engine.scheduler.stats.speculation
    assert stats.accepted_tokens > 0.7 * stats.draft_tokens
    assert stats.drafts < 50


def test_a_stop_token_ends_the_answer_in_the_middle_of_accepted_drafts(
    runner: ModelRunner, expected: list[list[int]]
) -> None:
    engine = InProcessEngine(runner, speculation=DRAFT_MODEL)
    for cut in range(1, 12):
        stop = expected[3][cut]
        if stop in expected[3][:cut]:
            continue
        sampling = greedy(LENGTH, stop_token_ids=(stop,))
        assert engine.generate([prompts()[3]], sampling) == [expected[3][: cut + 1]]
        assert engine.last["0"].finish_reason is FinishReason.STOP
        assert engine.generate([prompts()[3]], greedy(cut)) == [expected[3][:cut]]


def outcome(
    engine: InProcessEngine, prompt: list[int], sampling: SamplingParams
) -> tuple[list[int], str | None]:
    """The tokens of a request that may fail, and its error."""
    tokens: list[int] = []
    engine.scheduler.add(Request("x", tuple(prompt), sampling, 0.0))
    while (step := engine.scheduler.schedule()) is not None:
        for event in engine.scheduler.commit(step, engine.runner.run(step)):
            tokens += event.token_ids
            if event.finish_reason is not None:
                return tokens, event.error
    raise AssertionError("it never ended")


def test_a_draft_after_which_nothing_is_allowed_fails_only_if_accepted(runner: ModelRunner) -> None:
    a, b, c = 5, 6, 7
    only = greedy(12, logit_bias=((a, 100.0),), allowed_token_ids=(a, b), bad_words=((c, a), (c, b)))
    engine = InProcessEngine(runner, speculation=NGRAM)
    assert outcome(engine, [a, c, a, c], only) == ([a] * 12, None)
    assert engine.scheduler.stats.speculation.draft_tokens > 0
    ending = greedy(12, allowed_token_ids=(a,), bad_words=((a,) * 6,))
    assert outcome(InProcessEngine(runner), [a] * 8, ending) == ([a] * 5, NOTHING_ALLOWED)
    engine = InProcessEngine(runner, speculation=NGRAM)
    tokens, error = outcome(engine, [a] * 8, ending)
    assert (tokens, error) == ([a] * len(tokens), NOTHING_ALLOWED)
    engine.scheduler.check()


def test_an_impossible_request_evicts_nothing_from_the_prefix_cache(runner: ModelRunner) -> None:
    engine = InProcessEngine(runner)
    prompt = prompts()[-1]
    engine.generate([prompt], greedy(2))
    impossible = greedy(9, allowed_token_ids=(5,), bad_words=((5, 5),))
    assert outcome(engine, prompt, impossible)[1] == NOTHING_ALLOWED
    engine.generate([prompt], greedy(2))
    assert engine.last["0"].num_cached_tokens >= 16


def test_aborted_neighbours_leave_no_trace(runner: ModelRunner, expected: list[list[int]]) -> None:
    engine = InProcessEngine(runner, speculation=DRAFT_MODEL, num_blocks=12, max_model_len=130)
    for i, prompt in enumerate(prompts()):
        engine.scheduler.add(Request(f"victim{i}", tuple(prompt), SAMPLING[i], 0.0))
    for i in range(len(prompts())):
        step = engine.scheduler.schedule()
        assert step is not None
        engine.scheduler.commit(step, runner.run(step))
        engine.scheduler.abort(f"victim{i}")
        engine.scheduler.check()
    assert engine.generate(prompts(), greedy(LENGTH)) == expected


def test_a_draft_with_other_tokens_is_refused(directory: Path, tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=99, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="99 tokens and the model 211"):
        load(directory, speculative_model=tmp_path)


def test_a_draft_with_too_short_a_context_is_refused(directory: Path, tmp_path: Path) -> None:
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(
        config.replace('"max_position_embeddings": 256', '"max_position_embeddings": 64')
    )
    with pytest.raises(ConfigError, match="--max-model-len to 64"):
        load(directory, speculative_model=tmp_path)
    assert load(directory, speculative_model=tmp_path, max_model_len=64).max_model_len == 64


def test_the_drafts_keys_and_values_count_in_the_memory_of_the_cache(directory: Path) -> None:
    plain = load(directory, kv_cache_memory_bytes=1 << 20)
    drafted = load(directory, kv_cache_memory_bytes=1 << 20, speculative_model=directory)
    assert drafted.num_blocks == plain.num_blocks // 2
    assert drafted.kv_cache_bytes <= 1 << 20


@pytest.mark.one_in(2)
@pytest.mark.parametrize("speculation", [NGRAM, DRAFT_MODEL], ids=["n-gram", "draft model"])
def test_samples_have_the_models_distribution(tmp_path: Path, speculation: SpeculationConfig) -> None:
    """Chi-square over the pairs of the second and third token, for a vocabulary of 7."""
    models = {}
    for name, seed in (("model", 1), ("draft", 2)):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=7,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=64,
            initializer_range=0.2,
            eos_token_id=None,
            bos_token_id=None,
        )
        models[name] = LlamaForCausalLM(config).eval()
        models[name].save_pretrained(tmp_path / name)
    prompt, count = [1, 2, 3, 1, 2, 3, 1, 2], 4000
    engine = InProcessEngine(
        load(tmp_path / "model", speculative_model=tmp_path / "draft", max_num_seqs=64),
        speculation=speculation,
        max_num_seqs=64,
    )
    sampling = [SamplingParams(3, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(count)]
    answers = engine.generate([prompt] * count, sampling)
    stats = engine.scheduler.stats.speculation
    assert 0.1 * stats.draft_tokens < stats.accepted_tokens < stats.draft_tokens
    seen = Counter(tuple(answer) for answer in answers)
    with torch.inference_mode():
        contexts = [[*prompt, a, b] for a in range(7) for b in range(7)]
        logs = torch.log_softmax(models["model"](torch.tensor(contexts)).logits[:, len(prompt) - 1 :], dim=-1)
    chi_square, cells = 0.0, 0
    for index, (*_, a, b) in enumerate(contexts):
        for c in range(7):
            mean = count * float((logs[index, 0, a] + logs[index, 1, b] + logs[index, 2, c]).exp())
            chi_square += (seen[a, b, c] - mean) ** 2 / mean
            cells += 1
    # 342 degrees of freedom: mean 342, standard deviation 26.
    assert chi_square < 342 + 4 * 26
