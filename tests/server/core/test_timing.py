"""Where the time of a request went, as the scheduler stamps it."""

import time

from quire_server.core.request import Request, SamplingParams
from quire_server.core.scheduler import Scheduler, SchedulerConfig
from quire_server.core.step import StepResult

BLOCK = 4


def scheduler(num_blocks):
    config = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, num_blocks=num_blocks, block_size=BLOCK
    )
    return Scheduler(config, eos_token_ids=())


def request(name, max_tokens, arrival=0.0, **sampling):
    return Request(name, (1, 2, 3, 4, 5), SamplingParams(max_tokens, **sampling), arrival=arrival)


def run(scheduler):
    """The timings that each request was told, in order, and the monotonic time around all of it."""
    begin, told = time.monotonic(), {}
    while (step := scheduler.schedule()) is not None:
        for event in scheduler.commit(step, StepResult(step.step_id, (7,) * sum(step.samples))):
            assert event.error is None
            told.setdefault(event.request_id, []).append(event.timing)
    return begin, told, time.monotonic()


def test_the_first_event_and_the_last_say_where_the_time_went_and_no_other_does():
    one = scheduler(num_blocks=16)
    one.add(request("a", 6, logprobs=1))  # so that each token has an event
    _, told, end = run(one)
    first, *between, last = told["a"]
    assert between == [None] * 4
    assert first.finished is None and first.preemptions == 0
    assert last.queued <= last.scheduled <= last.first_token <= last.finished <= end
    assert (first.queued, first.scheduled, first.first_token) == (
        last.queued,
        last.scheduled,
        last.first_token,
    )


def test_waiting_for_a_row_is_queueing():
    one = scheduler(num_blocks=16)
    one.add(request("a", 1))
    begin, told, _ = run(one)
    (timing,) = told["a"]
    assert timing.queued <= begin <= timing.scheduled
    assert timing.finished is not None, "its first event is its last"


def test_a_preemption_is_counted_and_is_a_part_of_the_decode():
    one = scheduler(num_blocks=6)
    for number in range(3):
        one.add(request(f"r{number}", 11, arrival=float(number)))
    _, told, _ = run(one)
    ends = [timings[-1] for timings in told.values()]
    assert sum(timing.preemptions for timing in ends) == one.stats.preemptions > 0
    assert all(timing.scheduled <= timing.first_token <= timing.finished for timing in ends)
