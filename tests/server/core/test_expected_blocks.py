"""The KV blocks that requests are expected to need, which admission reserves for them."""

from quire_server.core.scheduler import Scheduler
from tests.server.core.fake_runner import EOS, FakeRunner, config, drain, request

SIZE = 4


def engine(**changes: object) -> tuple[Scheduler, FakeRunner]:
    settings = config(block_size=SIZE, num_blocks=40, max_model_len=100, **changes)
    return Scheduler(settings, eos_token_ids=[EOS]), FakeRunner(settings)


def step(scheduler: Scheduler, runner: FakeRunner) -> None:
    planned = scheduler.schedule()
    assert planned is not None
    scheduler.commit(planned, runner.run(planned))


def expected(scheduler: Scheduler) -> tuple[int, int]:
    """Blocks that running requests will need in addition, and that waiting ones will need."""
    return scheduler.growth_blocks, scheduler.expected_waiting_blocks(())


def test_a_request_counts_with_prompt_and_answer_while_it_waits_and_with_its_growth_while_it_runs() -> None:
    scheduler, runner = engine()
    scheduler.add(request("a", range(7), max_tokens=13))
    assert expected(scheduler) == (0, 5)
    step(scheduler, runner)
    assert expected(scheduler) == (3, 0), "two of the five blocks are held"
    seen = {expected(scheduler)[0]}
    while scheduler.has_work:
        step(scheduler, runner)
        seen.add(expected(scheduler)[0])
    assert seen == {3, 2, 1, 0} and expected(scheduler) == (0, 0)


def test_a_request_that_is_not_added_yet_counts_as_waiting() -> None:
    scheduler, _ = engine()
    assert scheduler.expected_waiting_blocks([request("a", range(7), max_tokens=13)]) == 5


def test_answers_that_were_short_lower_what_the_next_one_is_expected_to_need() -> None:
    scheduler, _ = engine()
    for _ in range(9):
        scheduler._queue._output_lengths.learn(7, 60, 5)
    scheduler.add(request("a", range(7), max_tokens=60))
    assert expected(scheduler) == (0, 3)


def test_an_answer_longer_than_expected_is_expected_to_double_within_max_tokens() -> None:
    scheduler, runner = engine()
    scheduler._queue._output_lengths.learn(4, 20, 4)
    scheduler.add(request("a", range(4), max_tokens=20))
    assert expected(scheduler) == (0, 2)
    (sequence,) = scheduler._queue.sequences.values()
    totals = []
    while scheduler.has_work:
        step(scheduler, runner)
        if sequence.expected_total not in totals:
            totals.append(sequence.expected_total)
    assert totals == [8, 14, 24], (
        "at nine tokens, five of them an answer's: five more; at 17: up to max_tokens"
    )


def test_blocks_that_a_prefix_shares_count_once() -> None:
    scheduler, runner = engine()
    scheduler.add(request("a", range(17), max_tokens=20))
    step(scheduler, runner)
    growth, used = scheduler.growth_blocks, scheduler.kv_utilization
    scheduler.add(request("b", range(17), max_tokens=20))
    step(scheduler, runner)
    assert scheduler.growth_blocks == 2 * growth
    assert round((scheduler.kv_utilization - used) * 40) == 1, "four of its five blocks are a's"


def test_preempted_and_aborted_requests_leave_the_sums_as_if_they_had_never_run() -> None:
    scheduler, runner = engine(max_num_seqs=12)
    for number in range(12):  # 12 x 14 blocks, of 40
        scheduler.add(request(f"r{number}", [number], max_tokens=52))
    for _ in range(30):
        step(scheduler, runner)
    assert scheduler.stats.preemptions > 0, "the twelve were to outgrow the cache"
    waiting = [s for s in scheduler._queue.sequences.values() if s.status.value == "waiting"]
    assert waiting and expected(scheduler)[1] == sum(-(-s.expected_total // SIZE) for s in waiting)
    for sequence in list(scheduler._queue.sequences.values())[::2]:
        scheduler.abort(sequence.request.request_id)
    drain(scheduler, runner)
    assert expected(scheduler) == (0, 0)
