"""What ranks exchange for a step, whatever is in it: 2 sums a layer, 1 for the embedding, and 1 gather."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire_server.core.config import PreemptionMode, SpeculationConfig, SpeculativeMethod
from quire_server.core.sampling_params import SamplingParams
from quire_server.core.step import Step, StepResult
from tests.server.runner.in_process import InProcessEngine, greedy
from tests.server.runner.ranks_in_process import Ranks

ITEM = 4  # bytes of a float32
PROMPTS = [[(7 * i + 3 * j) % 200 + 2 for j in range(12 + 9 * i)] for i in range(4)]
Calls = list[tuple[str, int]]


@pytest.fixture(scope="module", params=[2, 4])
def ranks(directory: Path, request: pytest.FixtureRequest) -> Iterator[Ranks]:
    found = Ranks(directory, request.param, kv_offload_host_bytes=1 << 20, speculative_model=directory)
    yield found
    found.close()


@pytest.fixture
def steps(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Step, StepResult, Calls]]:
    """Every step that the runner computes, with what the ranks exchanged for it."""
    seen: list[tuple[Step, StepResult, Calls]] = []
    run: Callable[[Step], StepResult] = ranks.runner.run

    def counted(step: Step) -> StepResult:
        before = len(ranks.exchange.calls)
        result = run(step)
        seen.append((step, result, ranks.exchange.calls[before:]))
        return result

    monkeypatch.setattr(ranks.runner, "run", counted)
    return seen


def formula(ranks: Ranks, num_tokens: int, num_sampled: int) -> Calls:
    """Of a step that computes and samples so many tokens."""
    config = ranks.models[0].config
    sums = ("all_reduce", num_tokens * config.hidden_size * ITEM)
    part = -(-config.vocab_size // (16 * ranks.exchange.size)) * 16  # padded for the CPU's kernels
    return [sums] * (2 * config.num_layers + 1) + [("gather", num_sampled * part * ITEM)]


def kind(step: Step) -> str:
    if not step.rows:
        return "empty"
    decodes = [count == samples == 1 for count, samples in zip(step.num_tokens, step.samples, strict=True)]
    if step.drafts or step.draft_requests:
        return "drafts"
    if all(decodes):
        return "decodes"
    return "mixed" if any(decodes) else "prompts that end" if any(step.samples) else "part of a prompt"


@pytest.mark.parametrize("limits", [
    {"max_num_batched_tokens": 10, "max_num_seqs": 3},
    {"num_blocks": 8, "num_host_slots": 16, "preemption_mode": PreemptionMode.SWAP, "max_model_len": 96},
    {"speculation": SpeculationConfig(SpeculativeMethod.NGRAM, 4, lookup_min=1)},
    {"speculation": SpeculationConfig(SpeculativeMethod.DRAFT_MODEL, 3)},
])  # fmt: skip
def test_a_step_takes_two_sums_a_layer_one_more_and_one_gather(
    ranks: Ranks, steps: list[tuple[Step, StepResult, Calls]], limits: dict[str, object]
) -> None:
    engine = InProcessEngine(ranks.runner, **limits)
    sampling = [greedy(24), greedy(24, logit_bias=((99, 100.0),)), SamplingParams(24, seed=3), greedy(24)]
    engine.generate(PROMPTS, sampling)
    engine.generate(PROMPTS, sampling)  # prefix hits
    for step, result, calls in steps:
        drafted = (
            dict(result.drafts) if step.draft_requests else {}
        )  # by the draft model: as many as it likes
        num_tokens, num_sampled = (
            sum(
                1 + len(drafted[row]) if row in drafted else number
                for row, number in zip(step.rows, numbers, strict=True)
            )
            for numbers in (step.num_tokens, step.samples)
        )
        assert calls == formula(ranks, num_tokens, num_sampled)
    kinds = {kind(step) for step, _, _ in steps}
    if "speculation" in limits:
        assert "drafts" in kinds and engine.scheduler.stats.speculation.accepted_tokens > 0
    elif "num_blocks" in limits:
        assert engine.scheduler.kv.stats().swaps > 0
    else:
        assert kinds >= {"decodes", "mixed", "part of a prompt", "prompts that end"}


def test_scored_prompts_add_gathers_of_their_positions_and_no_sums(
    ranks: Ranks, steps: list[tuple[Step, StepResult, Calls]]
) -> None:
    InProcessEngine(ranks.runner).generate([PROMPTS[3]], greedy(3, prompt_logprobs=1))
    (first, _, calls), *decodes = steps
    plain = formula(ranks, first.total_tokens, 1)
    assert calls[: len(plain) - 1] == plain[:-1] and calls[-1] == plain[-1]
    extra = calls[len(plain) - 1 : -1]
    assert {name for name, _ in extra} == {"gather"}
    assert sum(size for _, size in extra) == (len(PROMPTS[3]) - 1) * plain[-1][1]
    assert [calls for _, _, calls in decodes] == [formula(ranks, 1, 1)] * 2


def test_a_step_that_computes_nothing_exchanges_nothing(ranks: Ranks) -> None:
    before = len(ranks.exchange.calls)
    assert ranks.runner.run(Step(1, (), (), (), (), (), ())).token_ids == ()
    assert len(ranks.exchange.calls) == before
