"""Greedy output equals transformers', token for token, with chunked prefill, batching and small blocks."""

import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from quire_server.core.config import PreemptionMode
from tests.server.models import families
from tests.server.models.variants import VARIANTS
from tests.server.runner.in_process import InProcessEngine, greedy, load

LENGTH = 20
CONDITIONS: dict[str, dict[str, object]] = {
    "one at a time": {"max_num_seqs": 1},
    "all together": {},
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 5},
    "single tokens": {"max_num_batched_tokens": 1},
    "whole prompts only": {"max_num_batched_tokens": 16, "enable_chunked_prefill": False},
    "no prefix cache": {"enable_prefix_caching": False},
    "preemption": {"num_blocks": 9, "max_model_len": 130},
    "preemption without prefix cache": {
        "num_blocks": 9,
        "max_model_len": 130,
        "enable_prefix_caching": False,
    },
    "swap": {
        "num_blocks": 9,
        "max_model_len": 130,
        "num_host_slots": 48,
        "preemption_mode": PreemptionMode.SWAP,
    },
    "swap without prefix cache, in chunks": {
        "num_blocks": 9,
        "max_model_len": 130,
        "num_host_slots": 48,
        "preemption_mode": PreemptionMode.SWAP,
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 7,
        "max_num_seqs": 5,
    },
    "preemption over host and disk": {
        "num_blocks": 9,
        "max_model_len": 130,
        "num_host_slots": 6,
        "num_disk_slots": 48,
    },
    "swap over host and disk": {
        "num_blocks": 9,
        "max_model_len": 130,
        "num_host_slots": 14,
        "num_disk_slots": 48,
        "preemption_mode": PreemptionMode.SWAP,
    },
}
_OFFLOAD_BYTES = 2 << 20


def prompts() -> list[list[int]]:
    """Lengths around the block size, and common prefixes."""
    rng = random.Random(3)
    shared = [rng.randrange(2, 211) for _ in range(64)]
    own = [[rng.randrange(2, 211) for _ in range(length)] for length in (1, 2, 15, 16, 17, 33, 70)]
    return own + [shared[:cut] + own[i][:3] for i, cut in enumerate((16, 31, 48, 64))] + [shared, shared]


@pytest.fixture(scope="module", params=[name for name in VARIANTS if name.startswith("Llama")])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    directory = tmp_path_factory.mktemp("llama")
    model = families.make(directory, request.param)
    runner = load(
        directory,
        kv_offload_host_bytes=_OFFLOAD_BYTES,
        kv_offload_disk_path=directory,
        kv_offload_disk_bytes=_OFFLOAD_BYTES,
    )
    yield runner, families.answers(model, prompts(), LENGTH), model
    runner.close()


@pytest.mark.one_in(6)
@pytest.mark.parametrize("condition", CONDITIONS.values(), ids=CONDITIONS)
def test_tiny_llamas_answer_as_transformers_does(tiny, condition: dict[str, object]) -> None:
    runner, expected, _ = tiny
    engine = InProcessEngine(runner, **condition)
    assert engine.generate(prompts(), greedy(LENGTH)) == expected
    if "num_disk_slots" in condition:  # by now the first prompts are on the disk
        assert engine.generate(prompts(), greedy(LENGTH)) == expected
    stats = engine.scheduler.stats
    assert ("num_blocks" in condition) == (stats.preemptions > 0)
    kv = engine.scheduler.kv.stats()
    assert ("preemption_mode" in condition) == (kv.swaps > 0)
    assert ("num_host_slots" in condition) == (kv.host_loaded > 0)
    assert ("num_disk_slots" in condition) == (kv.disk_loaded > 0)
    assert kv.corrupt == 0
    if condition.get("enable_prefix_caching", True):
        assert engine.generate(prompts()[-2:], greedy(LENGTH)) == expected[-2:]
        assert engine.last["0"].num_cached_tokens >= 48


def test_the_distribution_is_transformers_own(tiny) -> None:
    runner, _, model = tiny
    prompt = prompts()[6]
    engine = InProcessEngine(runner, max_num_batched_tokens=32)
    engine.generate([prompt], greedy(1, logprobs=211))
    with torch.inference_mode():
        expected = torch.log_softmax(model(torch.tensor([prompt])).logits[0, -1], dim=-1)
    (entry,) = engine.logprobs["0"]
    ours = torch.tensor([value for _, value in sorted(entry.top)])
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
    assert entry.top[0] == (entry.token_id, entry.logprob)


QUESTIONS = [
    "What is the capital of France?",
    "Count from 1 to 12.",
    "Why is the sky blue?",
]


@pytest.fixture(scope="module")
def smollm2_prompts(smollm2: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    template = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    return [tokenizer.encode(template.format(question)).ids for question in QUESTIONS]


@pytest.fixture(scope="module")
def smollm2_answers(smollm2: Path, smollm2_prompts: list[list[int]]) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    return families.answers(model, smollm2_prompts, 16)


@pytest.fixture(scope="module")
def smollm2_runner(smollm2: Path):
    return load(smollm2, max_model_len=512)


@pytest.mark.parametrize(
    "condition",
    [{}, {"num_blocks": 5, "max_num_batched_tokens": 9}],
    ids=["all together", "chunks and preemption"],
)
def test_smollm2_answers_as_transformers_does(
    smollm2_runner, smollm2_prompts, smollm2_answers, condition: dict[str, object]
) -> None:
    engine = InProcessEngine(smollm2_runner, **condition)
    assert engine.generate(smollm2_prompts, greedy(16)) == smollm2_answers
    assert ("num_blocks" in condition) == (engine.scheduler.stats.preemptions > 0)


def test_smollm2_knows_the_capital_of_france(smollm2: Path, smollm2_answers: list[list[int]]) -> None:
    assert "Paris" in Tokenizer.from_file(str(smollm2 / "tokenizer.json")).decode(smollm2_answers[0])
