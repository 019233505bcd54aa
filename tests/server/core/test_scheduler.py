import time

import pytest

from quire_server.core.policy import TOP_PRIORITY
from quire_server.core.request import FinishReason, Request
from quire_server.core.sampling_params import SamplingParams
from quire_server.core.scheduler import Scheduler, SchedulerConfig
from quire_server.core.step import StepResult
from tests.server.core.fake_runner import EOS, FakeRunner, answer, config, drain, is_error, request


def engine(**changes: object) -> tuple[Scheduler, FakeRunner]:
    settings = config(**changes)
    return Scheduler(settings, eos_token_ids=[EOS]), FakeRunner(settings)


def run(scheduler: Scheduler, runner: FakeRunner) -> None:
    step = scheduler.schedule()
    assert step is not None
    scheduler.commit(step, runner.run(step))
    scheduler.check()


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_blocks", [9, 12, 40])
def test_answers_are_right_at_any_size_of_the_cache(chunked: bool, caching: bool, num_blocks: int) -> None:
    scheduler, runner = engine(
        num_blocks=num_blocks,
        enable_chunked_prefill=chunked,
        enable_prefix_caching=caching,
        max_num_batched_tokens=7,
        max_model_len=36,
    )
    prompts = {f"r{i}": [7] * (i % 12) + [i, i + 1] for i in range(30)}
    for name, prompt in prompts.items():
        scheduler.add(request(name, prompt, max_tokens=15))
    tokens, last = drain(scheduler, runner)
    assert tokens == {name: answer(prompt, 15) for name, prompt in prompts.items()}
    assert all(event.finish_reason is FinishReason.LENGTH for event in last.values())
    assert (scheduler.stats.preemptions > 0) == (num_blocks < 40)
    assert (scheduler.kv.stats().prefix_hits > 0) == caching
    assert scheduler.kv_utilization == 0


def test_decodes_go_on_while_a_long_prompt_is_computed_in_chunks() -> None:
    scheduler, runner = engine()
    scheduler.add(request("short", [1, 2], max_tokens=20))
    run(scheduler, runner)
    scheduler.add(request("long", range(50), max_tokens=2))
    sizes = []
    for _ in range(4):
        step = scheduler.schedule()
        assert step is not None
        sizes.append(step.num_tokens)
        scheduler.commit(step, runner.run(step))
    assert sizes == [(1, 15), (1, 15), (1, 15), (1, 5)]


def test_without_chunked_prefill_a_prompt_is_never_split_and_never_starved() -> None:
    scheduler, runner = engine(enable_chunked_prefill=False, max_num_batched_tokens=8)
    for i in range(3):
        scheduler.add(request(f"decode{i}", [i], max_tokens=50))
    run(scheduler, runner)
    scheduler.add(request("long", range(60), max_tokens=1))
    step = scheduler.schedule()
    assert step is not None and step.num_tokens == (1, 1, 1, 60)
    scheduler.commit(step, runner.run(step))


def test_the_first_running_request_is_never_preempted() -> None:
    scheduler, runner = engine(num_blocks=8, max_model_len=32)
    for i in range(4):
        scheduler.add(request(f"r{i}", [i] * 4, max_tokens=20))
    finished = []
    while (step := scheduler.schedule()) is not None:
        events = scheduler.commit(step, runner.run(step))
        finished += [event.request_id for event in events if event.finish_reason]
    assert finished == ["r0", "r1", "r2", "r3"] and scheduler.stats.preemptions > 0


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "reason"),
    [([], 1, "empty"), (range(64), 1, "Shorten"), (range(99), 1, "Shorten"), ([1], 0, "max_tokens")],
)
def test_a_request_that_can_never_fit_fails_and_others_run(
    prompt: list[int], max_tokens: int, reason: str
) -> None:
    scheduler, runner = engine()
    scheduler.add(request("bad", prompt, max_tokens))
    scheduler.add(request("good", [1], 3))
    tokens, last = drain(scheduler, runner)
    assert is_error(last["bad"]) and reason in str(last["bad"].error)
    assert tokens["good"] == answer([1], 3)


def test_a_failure_is_reported_even_if_nothing_else_runs() -> None:
    scheduler, runner = engine()
    scheduler.add(request("bad", []))
    assert scheduler.has_work
    _, last = drain(scheduler, runner)
    assert is_error(last["bad"]) and not scheduler.has_work


def test_a_request_that_outgrows_the_cache_fails_and_the_next_one_runs() -> None:
    scheduler, runner = engine(num_blocks=3, max_model_len=64)
    scheduler.add(request("greedy", [1, 2], max_tokens=40))
    scheduler.add(request("modest", [3], max_tokens=5))
    tokens, last = drain(scheduler, runner)
    assert is_error(last["greedy"]) and "KV cache" in str(last["greedy"].error)
    assert tokens["modest"] == answer([3], 5)


def test_abort_frees_everything_at_every_stage() -> None:
    scheduler, runner = engine()
    scheduler.abort("unknown")
    scheduler.add(request("waiting", [1]))
    scheduler.abort("waiting")
    assert not scheduler.has_work and scheduler.schedule() is None
    scheduler.add(request("running", range(20), 9))
    scheduler.add(request("other", [5], 9))
    run(scheduler, runner)
    scheduler.abort("running")
    step = scheduler.schedule()
    assert step is not None
    result = runner.run(step)
    scheduler.abort("other")  # while its step is in flight
    assert not scheduler.commit(step, result)
    scheduler.check()
    assert scheduler.kv_utilization == 0 and not scheduler.has_work
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)


def test_an_id_in_use_is_refused() -> None:
    scheduler, _ = engine()
    scheduler.add(request("same", [1]))
    with pytest.raises(ValueError, match="in use"):
        scheduler.add(request("same", [2]))


def sampled(scheduler: Scheduler, token: int) -> tuple[FinishReason | None, tuple[int, ...]]:
    """One step of a single request, with this token as its result."""
    step = scheduler.schedule()
    assert step is not None
    (event,) = scheduler.commit(step, StepResult(step.step_id, (token,)))
    return event.finish_reason, event.token_ids


def test_stop_tokens_end_an_answer_only_after_min_tokens() -> None:
    params = SamplingParams(max_tokens=9, stop_token_ids=(7,), min_tokens=1)
    for token in (7, EOS):
        scheduler, _ = engine()
        scheduler.add(Request("r", (1,), params, 0.0))
        assert sampled(scheduler, token) == (None, (token,))
        assert sampled(scheduler, token) == (FinishReason.STOP, (token,))


def test_ignore_eos_ignores_eos_only() -> None:
    scheduler, _ = engine()
    scheduler.add(Request("r", (1,), SamplingParams(9, stop_token_ids=(7,), ignore_eos=True), 0.0))
    assert sampled(scheduler, EOS)[0] is None
    assert sampled(scheduler, 7)[0] is FinishReason.STOP


def test_the_context_ends_an_answer_with_length() -> None:
    scheduler, runner = engine(max_model_len=10)
    scheduler.add(request("r", range(8), max_tokens=99))
    tokens, last = drain(scheduler, runner)
    assert len(tokens["r"]) == 2 and last["r"].finish_reason is FinishReason.LENGTH


def test_only_a_row_that_could_not_be_sampled_fails() -> None:
    scheduler, _ = engine()
    for name in ("bad", "good"):
        scheduler.add(request(name, [1]))
    step = scheduler.schedule()
    assert step is not None
    result = StepResult(step.step_id, (0, 3), failures={step.rows[0]: "no number"})
    events = list(scheduler.commit(step, result))
    assert is_error(events[0]) and events[1].token_ids == (3,)
    assert scheduler.num_running == 1


def test_cached_prompt_tokens_are_reported() -> None:
    scheduler, runner = engine()
    scheduler.add(request("first", range(13)))
    drain(scheduler, runner)
    scheduler.add(request("second", range(13)))
    _, last = drain(scheduler, runner)
    assert last["second"].num_cached_tokens == 12


def test_unseeded_requests_get_a_seed_of_their_own() -> None:
    scheduler, _ = engine()
    for name in ("a", "b"):
        scheduler.add(request(name, [1]))
    step = scheduler.schedule()
    assert step is not None and len({started.seed for started in step.started}) == 2


def test_a_step_of_256_decodes_is_scheduled_in_well_under_a_millisecond() -> None:
    settings = SchedulerConfig(256, 4096, 4096, 8192, 16)
    scheduler, runner = Scheduler(settings, eos_token_ids=[EOS]), FakeRunner(settings)
    for i in range(256):
        scheduler.add(request(f"r{i}", [i] * 8, max_tokens=200))
    run(scheduler, runner)
    times = []
    for _ in range(50):
        begin = time.perf_counter()
        step = scheduler.schedule()
        times.append(time.perf_counter() - begin)
        assert step is not None and len(step.rows) == 256
        scheduler.commit(step, StepResult(step.step_id, (1,) * 256))
    assert sorted(times)[len(times) // 2] < 1e-3  # a tenth of that on an idle core


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("num_blocks", [9, 12, 40])
def test_an_exclusive_request_shares_no_step_and_the_others_get_the_same_tokens(
    chunked: bool, num_blocks: int
) -> None:
    """Though rows, blocks or budget are scarce, and though another urgent request is before it."""
    scheduler, runner = engine(
        num_blocks=num_blocks,
        enable_chunked_prefill=chunked,
        max_num_batched_tokens=7,
        max_model_len=36,
        max_num_seqs=3,
    )
    prompts = {f"r{i}": [7] * (i % 12) + [i, i + 1] for i in range(8)}
    for name, prompt in prompts.items():
        scheduler.add(request(name, prompt, max_tokens=15))
    for _ in range(4):
        run(scheduler, runner)
    prompts |= {"urgent": [3, 4], "canary": [5, 6, 7]}
    scheduler.add(request("urgent", prompts["urgent"], max_tokens=15, priority=TOP_PRIORITY))
    scheduler.add(
        request("canary", prompts["canary"], max_tokens=15, priority=TOP_PRIORITY), is_exclusive=True
    )
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    shared = 0
    while (step := scheduler.schedule()) is not None:
        result = runner.run(step)
        together = {runner.rows[row].request_id for row in step.rows}
        shared += "canary" in together and len(together) > 1
        for event in scheduler.commit(step, result):
            tokens[event.request_id] += event.token_ids
        scheduler.check()
    assert shared == 0
    for name, prompt in prompts.items():
        expected = answer(prompt, 15)
        assert tokens[name] == expected[15 - len(tokens[name]) :], name
    assert tokens["canary"] == answer(prompts["canary"], 15)


def test_texts_to_pool_are_computed_whole_and_one_that_exceeds_the_budget_alone() -> None:
    scheduler, runner = engine(
        pools=True,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
        max_num_batched_tokens=10,
        max_model_len=65,
    )
    for name, length in {"a": 4, "b": 5, "c": 3, "long": 64, "d": 1}.items():
        scheduler.add(request(name, range(length), max_tokens=1))
    steps = []
    while scheduler.has_work:
        step = scheduler.schedule()
        assert step is not None
        steps.append(step.num_tokens)
        scheduler.commit(step, runner.run(step))
        scheduler.check()
    assert steps == [(4, 5), (3,), (64,), (1,)]
    assert scheduler.num_running == scheduler.num_waiting == scheduler.kv_utilization == 0
