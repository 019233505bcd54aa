"""Greedy output of every family equals transformers', token for token, with every pair of engine settings."""

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import combinations, product
from pathlib import Path

import pytest
import torch
import transformers

from quire_server.runner.model_runner import ModelRunner
from tests.server.models import families, matrix
from tests.server.models.variants import VARIANTS, VOCAB, WINDOW
from tests.server.runner.in_process import InProcessEngine, greedy, load
from tests.server.runner.ranks_in_process import Ranks

LENGTH = 20


@dataclass(frozen=True)
class Tiny:
    """One variant, in Quire and in transformers."""

    directory: Path
    runner: ModelRunner
    model: transformers.PreTrainedModel
    answers: dict[tuple[int, ...], list[int]]
    divided: dict[int, Ranks] = field(default_factory=dict)

    def runner_of(self, ranks: int) -> ModelRunner:
        """Rank 0's runner of so many."""
        if ranks == 1:
            return self.runner
        if ranks not in self.divided:
            self.divided[ranks] = Ranks(self.directory, ranks, **_options(self.directory))
        return self.divided[ranks].runner


def _options(directory: Path) -> dict[str, object]:
    return {"kv_offload_host_bytes": 4 << 20, "speculative_model": directory}


def _prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(2, VOCAB), k=length)


# The first two of each list together exceed the small pool, so the second is preempted.
DISTINCT = [_prompt(seed, length) for seed, length in enumerate((45, 46, 44, 1, 16, 33, 70, 2), start=1)]
LONG = DISTINCT[6]
SHARED = _prompt(0, 48)
ALIKE = [SHARED[:cut] + DISTINCT[index][:14] for index, cut in enumerate((48, 48, 48, 16, 31, 48))]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Tiny]]:
    """Each variant is made, loaded and run once."""
    made: dict[str, Tiny] = {}

    def get(variant: str) -> Tiny:
        if variant not in made:
            directory: Path = tmp_path_factory.mktemp("model")
            model = families.make(directory, variant)
            prompts = [*DISTINCT, *ALIKE]
            answers = families.answers(model, prompts, LENGTH)
            assert len({token for answer in answers for token in answer}) > 25, (
                "too uniform to prove anything"
            )
            by_prompt = dict(zip(map(tuple, prompts), answers, strict=True))
            runner = load(directory, **_options(directory))
            made[variant] = Tiny(directory, runner, model, by_prompt)
        return made[variant]

    yield get
    for one in made.values():
        for ranks in one.divided.values():
            ranks.close()


@pytest.mark.one_in(12)
@pytest.mark.parametrize("case", matrix.pairwise(), ids=lambda case: " - ".join(case.values()))
def test_the_answers_are_those_of_transformers(tiny: Callable[[str], Tiny], case: matrix.Case) -> None:
    ours = tiny(case["family"])
    engine = InProcessEngine(ours.runner_of(matrix.RANKS[case["ranks"]]), **matrix.settings(case))
    is_hit = case["prefix"] == "prefix hit"
    prompts = ALIKE if is_hit else DISTINCT
    if is_hit:
        engine.generate([SHARED], greedy(1))
    assert engine.generate(prompts, greedy(LENGTH)) == [ours.answers[tuple(prompt)] for prompt in prompts]

    assert (case["speculation"] == "no drafts") <= (engine.scheduler.stats.speculation.drafts == 0)
    if case["speculation"] == "drafts of a draft model" and case["chunk"] != "chunks of 3":
        assert engine.scheduler.stats.speculation.accepted_tokens > 0
    is_preempted = case["preemption"] != "no preemption"
    assert is_preempted == (engine.scheduler.stats.preemptions > 0)
    assert (case["preemption"] == "preemption, swapped") == (engine.scheduler.kv.stats().swaps > 0)
    cached = [event.num_cached_tokens for event in engine.last.values()]
    if is_hit:
        assert max(cached) >= 32
    elif not is_preempted:
        assert max(cached) == 0


@pytest.mark.one_in(4)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_distributions_are_those_of_transformers(tiny: Callable[[str], Tiny], variant: str) -> None:
    theirs = tiny(variant)
    answer, ours = _distributions(theirs.runner, LENGTH)
    torch.testing.assert_close(ours, _expected(theirs.model, answer), atol=1e-4, rtol=0)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_error_of_bfloat16_is_at_most_that_of_transformers(
    tiny: Callable[[str], Tiny], variant: str
) -> None:
    made = tiny(variant)
    rounded = copy.deepcopy(made.model).bfloat16()
    answer, ours = _distributions(load(made.directory, dtype="bfloat16"), 4)
    theirs, exact = _expected(rounded, answer), _expected(rounded.float(), answer)
    assert (ours - exact).abs().mean() < 4 * (theirs - exact).abs().mean()


def _distributions(runner: ModelRunner, length: int) -> tuple[list[int], torch.Tensor]:
    """The output for a prompt longer than the window, and the log-probabilities of all tokens at each
    position.
    """
    assert len(LONG) > 3 * WINDOW
    engine = InProcessEngine(runner, max_num_batched_tokens=32)
    (answer,) = engine.generate([LONG], greedy(length, logprobs=VOCAB))
    tops = [sorted(entry.top) for entry in engine.logprobs["0"]]
    return answer, torch.tensor([[value for _, value in top] for top in tops])


@torch.inference_mode()
def _expected(model: transformers.PreTrainedModel, answer: list[int]) -> torch.Tensor:
    logits = model(torch.tensor([LONG + answer])).logits[0, len(LONG) - 1 : -1]
    return torch.log_softmax(logits.float(), dim=-1)


def test_every_possible_pair_is_in_some_case_and_no_impossible_one() -> None:
    cases = matrix.pairwise()
    covered = {pair for case in cases for pair in matrix.pairs(case)}
    possible = {
        ((one, a), (other, b))
        for one, other in combinations(sorted(matrix.AXES), 2)
        for a, b in product(matrix.AXES[one], matrix.AXES[other])
        if matrix.is_possible({one: a, other: b})
    }
    assert covered == possible
    assert len(cases) <= 1.3 * len(VARIANTS) * len(matrix.CHUNK)
