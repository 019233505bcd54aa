"""The timestamps of a request in its events."""

import time

from quire_server.core.request import Request
from quire_server.core.sampling_params import SamplingParams
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
    """The timings in each request's events, in order, and the monotonic time before and after."""
    begin, timings = time.monotonic(), {}
    while (step := scheduler.schedule()) is not None:
        for event in scheduler.commit(step, StepResult(step.step_id, (7,) * sum(step.samples))):
            assert event.error is None
            timings.setdefault(event.request_id, []).append(event.timing)
    return begin, timings, time.monotonic()


def test_only_the_first_and_the_last_event_carry_timings():
    one = scheduler(num_blocks=16)
    one.add(request("a", 6, logprobs=1))  # so that each token has an event
    _, timings, end = run(one)
    first, *between, last = timings["a"]
    assert between == [None] * 4
    assert first.finished is None and first.preemptions == 0
    assert last.queued <= last.scheduled <= last.first_token <= last.finished <= end
    assert (first.queued, first.scheduled, first.first_token) == (
        last.queued,
        last.scheduled,
        last.first_token,
    )


def test_time_waiting_for_a_row_is_queue_time():
    one = scheduler(num_blocks=16)
    one.add(request("a", 1))
    begin, timings, _ = run(one)
    (timing,) = timings["a"]
    assert timing.queued <= begin <= timing.scheduled
    assert timing.finished is not None, "its first event is its last"


def test_a_preemption_is_counted_and_its_time_is_decode_time():
    one = scheduler(num_blocks=6)
    for number in range(3):
        one.add(request(f"r{number}", 11, arrival=float(number)))
    _, timings, _ = run(one)
    ends = [timing[-1] for timing in timings.values()]
    assert sum(timing.preemptions for timing in ends) == one.stats.preemptions > 0
    assert all(timing.scheduled <= timing.first_token <= timing.finished for timing in ends)
