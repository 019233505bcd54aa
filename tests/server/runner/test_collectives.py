"""What ranks exchange for a step, whatever is in it: 2 sums a layer, 1 for the embedding, and 1 gather: of
logits, or of 8 bytes for each position where all of them want the likeliest token.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from quire_kernels.sampling import largest as largest_op
from quire_kernels.sampling.largest import largest_pair_reference, largest_reference
from quire_server.core.config import PreemptionMode, SpeculationConfig, SpeculativeMethod
from quire_server.core.sampling_params import SamplingParams
from quire_server.core.step import Step, StepResult
from quire_server.layers import parallel
from quire_server.layers.parallel import argmax
from tests.server.models import families
from tests.server.models.lockstep import ThreadRanks
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
def steps(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Step, StepResult, Calls, bool]]:
    """Every step that the runner computes, with what the ranks exchanged for it, and whether it is greedy."""
    seen: list[tuple[Step, StepResult, Calls, bool]] = []
    started = ranks.runner._input_batch.started
    run: Callable[[Step], StepResult] = ranks.runner.run

    def counted(step: Step) -> StepResult:
        before = len(ranks.exchange.calls)
        result = run(step)
        sampling = [started[row] for row, count in zip(step.rows, step.samples, strict=True) if count]
        is_greedy = all(
            row and row.sampling in (greedy(24), greedy(3, prompt_logprobs=1)) for row in sampling
        )
        seen.append((step, result, ranks.exchange.calls[before:], is_greedy))
        return result

    monkeypatch.setattr(ranks.runner, "run", counted)
    return seen


def formula(ranks: Ranks, num_tokens: int, num_sampled: int, *, is_greedy: bool) -> Calls:
    """Of a step that computes and samples so many tokens."""
    config = ranks.models[0].config
    sums = ("all_reduce", num_tokens * config.hidden_size * ITEM)
    part = -(-config.vocab_size // (16 * ranks.exchange.size)) * 16  # padded for the CPU's kernels
    gathered = 8 if is_greedy else part * ITEM
    return [sums] * (2 * config.num_layers + 1) + [("gather", num_sampled * gathered)]


def kind(step: Step) -> str:
    if not step.rows:
        return "empty"
    decodes = [count == samples == 1 for count, samples in zip(step.num_tokens, step.samples, strict=True)]
    if step.drafts or step.draft_requests:
        return "drafts"
    if all(decodes):
        return "decodes"
    return "mixed" if any(decodes) else "prompts that end" if any(step.samples) else "part of a prompt"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("limits", [
    {"max_num_batched_tokens": 10, "max_num_seqs": 3},
    {"num_blocks": 8, "num_host_slots": 16, "preemption_mode": PreemptionMode.SWAP, "max_model_len": 96},
    {"speculation": SpeculationConfig(SpeculativeMethod.NGRAM, 4, lookup_min=1)},
    {"speculation": SpeculationConfig(SpeculativeMethod.DRAFT_MODEL, 3)},
])  # fmt: skip
def test_a_step_takes_two_sums_a_layer_one_more_and_one_gather(
    ranks: Ranks, steps: list[tuple[Step, StepResult, Calls, bool]], limits: dict[str, object]
) -> None:
    engine = InProcessEngine(ranks.runner, **limits)
    sampling = [greedy(24), greedy(24, logit_bias=((99, 100.0),)), SamplingParams(24, seed=3), greedy(24)]
    engine.generate(PROMPTS, sampling)
    engine.generate(PROMPTS, sampling)  # prefix hits
    engine.generate(PROMPTS[:1], greedy(24))
    for step, result, calls, is_greedy in steps:
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
        assert calls == formula(ranks, num_tokens, num_sampled, is_greedy=is_greedy)
    assert {is_greedy for *_, is_greedy in steps} == {True, False}
    kinds = {kind(step) for step, *_ in steps}
    if "speculation" in limits:
        assert "drafts" in kinds and engine.scheduler.stats.speculation.accepted_tokens > 0
    elif "num_blocks" in limits:
        assert engine.scheduler.kv.stats().swaps > 0
    else:
        assert kinds >= {"decodes", "mixed", "part of a prompt", "prompts that end"}


def test_scored_prompts_add_gathers_of_their_positions_and_no_sums(
    ranks: Ranks, steps: list[tuple[Step, StepResult, Calls, bool]]
) -> None:
    InProcessEngine(ranks.runner).generate([PROMPTS[3]], greedy(3, prompt_logprobs=1))
    (first, _, calls, is_greedy), *decodes = steps
    assert is_greedy
    plain = formula(ranks, first.total_tokens, 1, is_greedy=True)
    assert calls[: len(plain) - 1] == plain[:-1] and calls[-1] == plain[-1]
    extra = calls[len(plain) - 1 : -1]
    assert {name for name, _ in extra} == {"gather"}
    _, each = formula(ranks, 1, 1, is_greedy=False)[-1]
    assert sum(size for _, size in extra) == (len(PROMPTS[3]) - 1) * each
    assert [calls for _, _, calls, _ in decodes] == [formula(ranks, 1, 1, is_greedy=True)] * 2


@pytest.mark.one_in(2)
@pytest.mark.parametrize("sampling", [
    SamplingParams(9, temperature=0.7, seed=1, ignore_eos=True),
    greedy(9, logprobs=0),
    greedy(9, logit_bias=((5, 2.0),)),
    greedy(9, repetition_penalty=1.2),
    greedy(9, min_tokens=9, stop_token_ids=(7,)),
], ids=["temperature", "logprobs", "bias", "penalty", "min_tokens"])  # fmt: skip
def test_one_request_that_needs_more_than_the_likeliest_token_makes_its_steps_gather_logits(
    ranks: Ranks, steps: list[tuple[Step, StepResult, Calls, bool]], sampling: SamplingParams
) -> None:
    InProcessEngine(ranks.runner).generate(PROMPTS[:2], [greedy(24), sampling])
    *_, both = (calls for step, _, calls, _ in steps if len(step.rows) == 2)
    assert both == formula(ranks, 2, 2, is_greedy=False)
    assert steps[-1][2] == formula(ranks, 1, 1, is_greedy=True), "when the other one is left alone"


def _find_places_as_on(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch, as where there are no CPU kernels, or as on a GPU; "kernel": as it is here."""
    if place != "kernel":
        monkeypatch.setattr(parallel, "largest", largest_reference)
        monkeypatch.setattr(parallel, "largest_pair", largest_pair_reference)
        monkeypatch.setattr(largest_op, "_places_on_cpu", getattr(largest_op, f"_places_on_{place}"))


@pytest.mark.parametrize("place", ["kernel", "cpu", "gpu"])
@pytest.mark.parametrize("values", [
    [[1.0, 3.0, 2.0], [3.0, 0.0, 3.0], [-1.0, -2.0]],
    [[-5.0, -3.0, -4.0], [-3.5, -9.0, -3.5], []],
    [[float("-inf")] * 3, [float("-inf")] * 3, [float("-inf"), -1e30]],
])  # fmt: skip
def test_the_largest_logit_of_all_ranks_is_the_first_of_equals(
    values: list[list[float]], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _find_places_as_on(place, monkeypatch)
    whole = torch.tensor([number for part in values for number in part])
    exchange = ThreadRanks(3)
    parts = [
        partial(argmax, communicator, torch.tensor([part]), first)
        for communicator, part, first in zip(exchange.communicators, values, (0, 3, 6), strict=True)
    ]
    assert exchange.run(parts)[0].tolist() == [[float(whole.max()), float(whole.numpy().argmax())]]
    assert exchange.calls == [("gather", 8)]


@pytest.mark.parametrize("place", ["kernel", "cpu", "gpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_logits_of_any_number_of_ranks_are_torchs(
    dtype: torch.dtype, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _find_places_as_on(place, monkeypatch)
    generator = torch.Generator().manual_seed(3)
    for ranks, rows, width in ((1, 2, 5), (2, 3, 40), (3, 7, 16), (5, 1, 3)):
        whole = torch.randn(rows, ranks * width, generator=generator)
        whole[whole > 1] = 1.5  # most rows have equals, in parts of several ranks
        whole[0, -1] = float("nan") if ranks == 3 else 1.5
        whole = whole.to(dtype)
        exchange = ThreadRanks(ranks)
        parts = [
            partial(argmax, communicator, whole[:, rank * width : (rank + 1) * width], rank * width)
            for rank, communicator in enumerate(exchange.communicators)
        ]
        best, tokens = exchange.run(parts)[0].unbind(1)
        assert torch.equal(tokens.long(), whole.argmax(dim=1))
        assert torch.equal(best.nan_to_num(9), whole.amax(dim=1).float().nan_to_num(9))
        assert exchange.calls == [("gather", 8 * rows)]


@pytest.mark.parametrize("place", ["kernel", "cpu", "gpu"])
def test_a_rank_whose_logits_are_not_finite_makes_the_largest_one_not_finite(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _find_places_as_on(place, monkeypatch)
    exchange = ThreadRanks(2)
    rows = torch.tensor([[1.0, 2.0], [float("nan"), 5.0]])
    parts = [partial(argmax, exchange.communicators[rank], rows.roll(rank, 0), 2 * rank) for rank in range(2)]
    (first, _), (second, _) = exchange.run(parts)[0].tolist()
    assert first != first and second != second


@pytest.mark.parametrize("stages", [2, 3])
def test_stages_share_the_sums_and_hand_on_two_states_at_each_border_and_the_logits_at_the_end(
    tmp_path: Path, stages: int
) -> None:
    families.build(tmp_path, "Llama", {"num_hidden_layers": 5})
    divided = Ranks(tmp_path, 2, stages)
    config, run, seen = divided.models[0].config, divided.runner.run, []
    part = divided.models[-1].config.vocab_rows

    def counted(step: Step) -> StepResult:
        before = _exchanged(divided)
        result = run(step)
        calls, size = (now - then for now, then in zip(_exchanged(divided), before, strict=True))
        seen.append((step, calls, size))
        return result

    divided.runner.run = counted  # type: ignore[method-assign]  # observed
    sampling = [greedy(8), SamplingParams(6, seed=3), greedy(8)]
    InProcessEngine(divided.runner, max_num_batched_tokens=10).generate(PROMPTS[:3], sampling)
    divided.close()
    kinds = set[tuple[bool, bool]]()
    for step, calls, size in seen:
        sampled = sum(step.samples)
        states = 2 * step.total_tokens * config.hidden_size * ITEM
        sums = 2 * (2 * 5 + 1) * step.total_tokens * config.hidden_size * ITEM
        handed_on = 2 * 2 * (stages - 1) * states  # by two ranks at each border, sent and received
        # Gathered by both ranks of the last stage, sent and received: the largest one or all.
        logits = {sampled * (2 * 8 + 2 * 8), sampled * (2 * part + 2 * config.vocab_size) * ITEM}
        assert calls == 2 * (2 * 5 + 1) + 4 * (stages - 1) + 2 + 2 * (sampled > 0)
        assert size - sums - handed_on in logits
        kinds.add((sampled > 0, size - sums - handed_on == max(logits)))
    assert len(kinds) == 3


def _exchanged(ranks: Ranks) -> tuple[int, int]:
    """Calls and bytes of all ranks so far."""
    communicators = ranks.exchange.communicators
    return sum(each.calls for each in communicators), sum(each.bytes for each in communicators)


def test_a_step_that_computes_nothing_exchanges_nothing(ranks: Ranks) -> None:
    before = len(ranks.exchange.calls)
    assert ranks.runner.run(Step(1, (), (), (), (), (), ())).token_ids == ()
    assert len(ranks.exchange.calls) == before
