"""Log-probabilities of prompts equal transformers', with chunks, cached prefixes and preemption."""

import random
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from quire_server.core.config import PreemptionMode
from quire_server.core.sampling_params import SamplingParams
from quire_server.runner import sampler
from quire_server.runner.model_runner import ModelRunner
from tests.server.models import families
from tests.server.runner.in_process import InProcessEngine, greedy, load

SHARED = [random.Random(1).randrange(2, 211) for _ in range(40)]
PROMPTS = [
    [*SHARED[: 8 * i], *(random.Random(10 + i).randrange(2, 211) for _ in range(1 + 5 * i))] for i in range(6)
]
NUM_TOP = 3
LENGTH = 24
SCORED = greedy(LENGTH, prompt_logprobs=NUM_TOP)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelRunner, LlamaForCausalLM]:
    directory: Path = tmp_path_factory.mktemp("llama")
    model = families.make(directory, "Llama, tied")
    return load(directory, kv_offload_host_bytes=2 << 20), model


def expected(model: LlamaForCausalLM, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0].log_softmax(-1)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "condition",
    [
        {},
        {"max_num_batched_tokens": 7, "max_num_seqs": 3},
        {"max_num_batched_tokens": 1},
        {"num_blocks": 8, "max_model_len": 100},
        {
            "num_blocks": 8,
            "max_model_len": 100,
            "num_host_slots": 40,
            "preemption_mode": PreemptionMode.SWAP,
        },
    ],
    ids=["together", "chunks", "single tokens", "preemption", "swap"],
)
@pytest.mark.parametrize("workspace", [1, 1 << 30], ids=["a position at a time", "all at once"])
def test_every_prompt_token_has_the_probability_that_transformers_gives_it(
    tiny: tuple[ModelRunner, LlamaForCausalLM],
    condition: dict[str, object],
    workspace: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, model = tiny
    monkeypatch.setattr(sampler, "_PROMPT_LOGITS_BYTES", workspace)
    engine = InProcessEngine(runner, **condition)
    plain = engine.generate(PROMPTS, greedy(LENGTH))  # also fills the prefix cache
    num_preempted = engine.scheduler.stats.preemptions
    assert engine.generate(PROMPTS, SCORED) == plain
    assert (engine.scheduler.stats.preemptions > num_preempted) == ("num_blocks" in condition)
    for index, prompt in enumerate(PROMPTS):
        found = engine.prompt_logprobs[str(index)]
        assert [one.token_id for one in found] == prompt[1:]
        oracle = expected(model, prompt)
        for position, one in enumerate(found):
            assert one.logprob == pytest.approx(oracle[position, one.token_id].item(), abs=1e-4)
            best = oracle[position].topk(NUM_TOP)
            assert [value for _, value in one.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_a_request_without_prompt_logprobs_gets_none_and_hits_the_prefix_cache(
    tiny: tuple[ModelRunner, LlamaForCausalLM],
) -> None:
    engine = InProcessEngine(tiny[0])
    engine.generate([SHARED], SCORED)
    engine.generate([SHARED, SHARED], [SCORED, greedy(LENGTH)])
    assert [len(engine.prompt_logprobs[name]) for name in ("0", "1")] == [len(SHARED) - 1, 0]
    assert [engine.last[name].num_cached_tokens for name in ("0", "1")] == [0, 32]


def test_a_prompt_of_one_token_has_no_logprobs(tiny: tuple[ModelRunner, LlamaForCausalLM]) -> None:
    engine = InProcessEngine(tiny[0])
    engine.generate([[5]], SamplingParams(2, temperature=0.0, ignore_eos=True, prompt_logprobs=0))
    assert engine.prompt_logprobs["0"] == []
