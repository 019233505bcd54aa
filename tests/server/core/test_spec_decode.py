"""How many tokens a request drafts, from which budget, and when drafting stops; test_scheduler_machine tests
the answers.
"""

import random

import pytest

from quire_server.core.config import SpeculationConfig, SpeculativeMethod
from quire_server.core.draft_length import AcceptanceRate, DraftCost, StepCosts, best_length, expected_tokens
from quire_server.core.ngram_proposer import NgramProposer
from quire_server.core.policy import TOP_PRIORITY
from quire_server.core.scheduler import Scheduler
from quire_server.core.step import Step, StepResult
from tests.server.core.fake_runner import EOS, FakeRunner, answer, config, drain, request

NGRAM = SpeculationConfig(SpeculativeMethod.NGRAM, 4)
DRAFT_MODEL = SpeculationConfig(SpeculativeMethod.DRAFT_MODEL, 4)


def engine(speculation: SpeculationConfig = DRAFT_MODEL, **changes: object) -> tuple[Scheduler, FakeRunner]:
    settings = config(speculation=speculation, **changes)
    return Scheduler(settings, eos_token_ids=[EOS], clock=lambda: 0.0), FakeRunner(settings)


def scheduled(scheduler: Scheduler, runner: FakeRunner) -> Step:
    step = scheduler.schedule()
    assert step is not None
    scheduler.commit(step, runner.run(step))
    scheduler.check()
    return step


@pytest.mark.parametrize(
    ("tokens", "draft"),
    [
        ([1, 2, 3, 4, 5, 1, 2], (3, 4, 5)),  # what followed
        ([1, 2, 3, 9, 1, 2, 4, 8, 1, 2], (4, 8, 1)),  # the latest time
        ([7, 1, 2, 3, 0, 9, 1, 2, 4, 0, 7, 1, 2], (3, 0, 9)),  # but rather after more of the same
        ([5, 6, 5, 6, 5, 6], (5, 6, 5)),  # a cycle goes on past the end
        ([3, 3, 3], (3, 3, 3)),
        ([1, 2, 3], ()),
        ([4, 4], ()),
        ([256, 1, 9, 65536, 256, 0, 1], ()),  # their bytes only look alike
    ],
)
def test_a_draft_is_the_continuation_of_the_last_occurrence_of_the_same_tokens(
    tokens: list[int], draft: tuple[int, ...]
) -> None:
    assert NgramProposer(2, 4).propose(tokens, 3) == draft


def test_an_incremental_proposer_equals_one_built_from_all_tokens() -> None:
    rng = random.Random(5)
    tokens, growing = list[int](), NgramProposer(1, 3)
    for _ in range(300):
        tokens += rng.choices([0, 1, 255, 256, 65536], k=rng.randint(1, 3))
        count = rng.randint(1, 6)
        assert growing.propose(tokens, count) == NgramProposer(1, 3).propose(tokens, count)


def test_the_expected_number_of_accepted_tokens_is_that_of_the_paper() -> None:
    assert expected_tokens(0.8, 3) == pytest.approx((1 - 0.8**4) / (1 - 0.8))
    assert expected_tokens(1.0, 5) == 6 and expected_tokens(0.0, 5) == 1


def test_the_draft_length_maximises_the_speed_and_is_0_for_a_gain_below_ten_percent() -> None:
    for tenth in range(11):
        for cost in (0.01, 0.1, 0.3, 0.6, 1.0):
            rates = [expected_tokens(tenth / 10, k) / (1 + k * cost) for k in range(1, 9)]
            best = best_length(tenth / 10, 8, DraftCost(0.0, cost))
            assert best == 0 if max(rates) <= 1.1 else rates[best - 1] == pytest.approx(max(rates))
    assert best_length(0.3, 8, DraftCost(0.0, 0.5)) == 0 and best_length(0.99, 8, DraftCost(0.0, 0.01)) == 8
    assert best_length(0.5, 1, DraftCost(0.0, 0.3)) == 1 and best_length(0.5, 1, DraftCost(0.3, 0.3)) == 0


def test_costs_are_estimated_from_measured_steps() -> None:
    """A step of four rows takes 1.2, one with drafts 0.3 more, and each draft 0.05."""
    costs, rng = StepCosts(has_draft_model=False), random.Random(1)
    for _ in range(300):
        drafts = rng.choice([0, 0, 1, 4, 8])
        seconds = 1.2 + (0.3 if drafts else 0.0) + 0.05 * drafts
        costs.record_step(4, min(drafts, 2), 4 + drafts, seconds * rng.uniform(0.98, 1.02))
    drafting = (1 + 2 + 2) / 3  # on average, in a step with drafts
    once, each = costs.cost(4)
    assert once == pytest.approx(4 * 0.3 / drafting / 1.2, rel=0.2)
    assert each == pytest.approx(4 * 0.05 / 1.2, rel=0.2)


def test_the_passes_of_a_draft_model_cost_what_they_take() -> None:
    costs = StepCosts(has_draft_model=True)
    for _ in range(300):
        costs.record_step(5, 0, 5, 1.0)
        costs.record_draft_passes(4, 2.0, 5)
    assert costs.cost(5).each == pytest.approx(0.1 + 0.5, rel=0.05)


def test_an_outlier_changes_the_estimate_little() -> None:
    costs = StepCosts(has_draft_model=False)
    for number in range(200):
        costs.record_step(8, 0, 8, 100.0 if number == 150 else 4.0)
        costs.record_step(
            8, 1 + number % 2, 9 + number % 2, 50.0 if number == 160 else 5.0 + 0.3 * (number % 2)
        )
    assert sum(costs.cost(8)) == pytest.approx(8 * (0.7 / 1.5 + 0.3) / 4.0, rel=0.25)


def test_steps_without_drafts_are_measured_periodically() -> None:
    costs, taken = StepCosts(has_draft_model=False), []
    for _ in range(140):
        plain = costs.needs_plain_step(8)
        taken.append(plain)
        costs.record_step(8, 0 if plain else 4, 8 if plain else 12, 1.0)
    assert [step for step, plain in enumerate(taken) if plain] == [8, 73, 138], "soon, and then seldom"


def test_no_request_drafts_in_a_step_that_measures_the_plain_cost() -> None:
    """The answer repeats itself, so it could draft in each step."""
    scheduler, _ = engine(NGRAM, max_model_len=700, num_blocks=300)
    scheduler.add(request("r", [5, 6, 5, 6], max_tokens=100))
    drafted = []
    while (step := scheduler.schedule()) is not None:
        drafted.append(bool(step.drafts))
        after = range(
            step.starts[0] + step.num_tokens[0] - step.samples[0], sum(step.starts + step.num_tokens)
        )
        scheduler.commit(step, StepResult(step.step_id, tuple(5 + (place + 1) % 2 for place in after)))
    assert drafted[1:9] == [True] * 8 and not drafted[9] and all(drafted[10:-2])


def test_older_drafts_count_less() -> None:
    acceptance = AcceptanceRate(decay=0.9)
    for _ in range(50):
        acceptance.learn(4, 0)
    for _ in range(20):
        acceptance.learn(4, 4)
    assert acceptance.estimate(0.5, 2.0) > 0.85


def test_drafts_use_only_the_token_budget_that_prompts_leave() -> None:
    scheduler, runner = engine(max_num_batched_tokens=8)
    scheduler.add(request("first", [1], max_tokens=30))
    scheduled(scheduler, runner)
    assert scheduled(scheduler, runner).draft_requests
    scheduler.add(request("long", range(20), max_tokens=30))
    step = scheduled(scheduler, runner)
    assert step.num_tokens == (1, 7) and not step.draft_requests
    while (step := scheduled(scheduler, runner)).num_tokens[-1] == 7:
        assert not step.draft_requests
    assert step.total_tokens <= 8


def test_drafts_take_no_block_from_other_requests() -> None:
    """In a pool that two answers just fill, drafts cause no additional preemption."""
    counts = []
    for speculation in (None, DRAFT_MODEL):
        settings = config(
            num_blocks=8, block_size=4, max_num_seqs=2, speculation=speculation, free_block_reserve=0.0
        )
        scheduler, runner = Scheduler(settings, eos_token_ids=[EOS], clock=lambda: 0.0), FakeRunner(settings)
        runner.accuracy = 1.0
        for i in range(2):
            scheduler.add(request(f"r{i}", [i, i], max_tokens=14))
        tokens, _ = drain(scheduler, runner)
        assert tokens == {f"r{i}": answer([i, i], 14) for i in range(2)}
        counts.append(scheduler.stats.preemptions)
    assert counts == [0, 0]


def test_no_draft_reaches_past_the_end_of_an_answer() -> None:
    scheduler, runner = engine()
    runner.accuracy = 1.0
    scheduler.add(request("r", [1, 2], max_tokens=6))
    while scheduler.has_work:
        step = scheduled(scheduler, runner)
        assert step.starts[0] + step.num_tokens[0] <= 2 + 6 - 1


def test_accepted_drafts_enter_the_prefix_cache_and_rejected_ones_never() -> None:
    scheduler, runner = engine(max_num_batched_tokens=64)
    runner.accuracy = 0.6
    scheduler.add(request("first", [1, 2, 3], max_tokens=40))
    tokens, _ = drain(scheduler, runner)
    said = [1, 2, 3, *tokens["first"]]
    scheduler.add(request("again", said[:41], max_tokens=3))
    tokens, last = drain(scheduler, runner)  # the fake runner compares what the blocks hold with the tokens
    assert tokens["again"] == said[41:43] + answer(said[:43], 1)
    assert last["again"].num_cached_tokens == 40


def test_a_request_whose_drafts_are_rejected_stops_drafting_and_retries_periodically() -> None:
    scheduler, runner = engine(max_model_len=700, num_blocks=300)
    runner.accuracy = 0.0
    scheduler.add(request("r", [1], max_tokens=600))
    at = []
    while scheduler.has_work:
        step = scheduled(scheduler, runner)
        at += [step.starts[0]] if step.draft_requests else []
    late = [place for place in at if place > 300]
    assert 1 <= len(late) <= 6 and len(at) < 25
    assert scheduler.stats.speculation.pauses >= 5


def test_a_request_whose_drafts_become_right_drafts_again() -> None:
    scheduler, runner = engine(max_model_len=700, num_blocks=300)
    scheduler.add(request("r", [1], max_tokens=600))
    lengths = []
    while scheduler.has_work:
        runner.accuracy = 0.0 if len(lengths) < 100 else 1.0
        step = scheduled(scheduler, runner)
        lengths.append(step.draft_requests[0][1] if step.draft_requests else 0)
    assert sum(lengths[60:100]) <= 4 and max(lengths[-30:-5]) == 4


def test_the_canary_never_drafts() -> None:
    scheduler, runner = engine()
    scheduler.add(request("canary", [1, 1, 1], max_tokens=20, priority=TOP_PRIORITY))
    while scheduler.has_work:
        assert not scheduled(scheduler, runner).draft_requests


def test_counters_report_drafted_and_accepted_tokens_by_position() -> None:
    scheduler, _ = engine(NGRAM)
    scheduler.add(request("r", [5, 6, 7, 8, 9, 5, 6], max_tokens=30))
    step = scheduler.schedule()
    assert step is not None and not step.drafts
    scheduler.commit(step, StepResult(step.step_id, (7,)))
    step = scheduler.schedule()
    assert step is not None and step.drafts == ((0, (8, 9, 5, 6)),) and step.samples == (5,)
    (event,) = scheduler.commit(step, StepResult(step.step_id, (8, 9, 1, 6, 7)))
    assert event.token_ids == (8, 9, 1)
    stats = scheduler.stats.speculation
    assert (stats.drafts, stats.draft_tokens, stats.accepted_tokens) == (1, 4, 2)
    assert stats.accepted_per_position == (1, 1, 0, 0)
