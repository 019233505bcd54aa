"""Admission control: the bounded queue and what it sheds."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_http.errors import ApiError
from quire_server.api.admission import (
    Admission,
    AdmissionRequest,
    AnswerLimits,
    Claim,
    Limits,
    Load,
    ServiceRate,
    is_short_of_memory,
    kv_demand,
    shed_reason,
)
from quire_server.core.stats import EngineStats
from quire_server.engine.messages import EngineInfo

INFO = EngineInfo(max_model_len=1000, vocab_size=9, num_blocks=10, block_size=10, max_num_seqs=2)
WIDE = EngineInfo(max_model_len=1000, vocab_size=9, num_blocks=10, block_size=10, max_num_seqs=8)
LARGE = EngineInfo(max_model_len=1000, vocab_size=9, num_blocks=10**6, block_size=10, max_num_seqs=2)
IDLE = EngineStats()


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def make_admission(clock=None, on_change=lambda requests, tokens: None, **limits):
    return Admission(Limits(**{"max_queued": 10, **limits}), clock or Clock(), on_change)


def reserve(admission, info=LARGE, stats=IDLE, priority=-1, **asked):
    """A claimed reservation. Urgent by default, so that it is never shed at random."""
    request = AdmissionRequest(priority=priority, **asked)
    reservation = admission.reserve(request.client, info, stats)
    reservation.claim(request, info, stats)
    return reservation


def answers(*prompt_tokens, max_tokens=0):
    """Answers to prompts of these lengths."""
    return [AnswerLimits(length, max_tokens) for length in prompt_tokens]


def refusal(admission, **more):
    with pytest.raises(ApiError) as refused:
        reserve(admission, **more)
    return refused.value


def retry_after(error):
    return int(dict(error.headers)["retry-after"])


@pytest.mark.parametrize(
    ("num_admitted", "waiting", "num_answers", "dice", "reason"),
    [
        (0, 0, 1, 0.0, None),
        (2, 0, 1, 0.0, None),
        (10, 8, 1, 0.0, None),  # 8 of 10: the shedding only begins
        (11, 9, 1, 0.49, "load_shed"),
        (11, 9, 1, 0.51, None),
        (12, 10, 1, 0.99, "queue_full"),
        (0, 10, 1, 0.99, "queue_full"),  # the engine itself says so: it may lack memory
        (5, 0, 8, 0.99, "queue_full"),  # eight answers do not fit where one would
        (4, 0, 8, 0.99, None),
    ],
)
def test_the_queue_is_bounded_and_load_is_shed_before_it_is_full(
    num_admitted, waiting, num_answers, dice, reason
):
    load = Load(num_admitted=num_admitted, max_running=2, waiting=waiting, max_queued=10)
    assert shed_reason(load, AdmissionRequest(num_answers=num_answers), dice) == reason


def test_low_priorities_are_shed_before_the_first_normal_one_and_high_ones_never():
    for waiting in range(11):
        load = Load(num_admitted=waiting + 2, max_running=2, waiting=waiting, max_queued=20)
        shed = {p: shed_reason(load, AdmissionRequest(priority=p), 0.0) for p in (-1, 0, 1)}
        assert shed[-1] is None and shed[0] is None and shed[1] is None
    at_three_quarters = Load(num_admitted=17, max_running=2, waiting=15, max_queued=20)
    shed = {p: shed_reason(at_three_quarters, AdmissionRequest(priority=p), 0.5) for p in (-1, 0, 1)}
    assert shed == {-1: None, 0: None, 1: "load_shed"}
    nearly_full = Load(num_admitted=21, max_running=2, waiting=19, max_queued=20)
    shed = {p: shed_reason(nearly_full, AdmissionRequest(priority=p), 0.7) for p in (-1, 0, 1)}
    assert shed == {-1: None, 0: "load_shed", 1: "load_shed"}


@given(st.integers(0, 40), st.integers(-1, 1), st.floats(0, 1, exclude_max=True))
def test_a_more_urgent_request_is_never_shed_where_a_less_urgent_one_is_not(waiting, priority, dice):
    load = Load(num_admitted=waiting + 2, max_running=2, waiting=waiting, max_queued=30)
    if shed_reason(load, AdmissionRequest(priority=priority), dice) is not None:
        assert shed_reason(load, AdmissionRequest(priority=priority + 1), dice) is not None


def test_with_a_queue_of_0_only_requests_that_can_run_at_once_are_admitted():
    assert shed_reason(Load(1, 2, 0, 0), AdmissionRequest(), 0.0) is None
    assert shed_reason(Load(2, 2, 0, 0), AdmissionRequest(), 0.99) == "queue_full"


def test_a_reservation_counts_at_once_and_is_released():
    seen = []
    admission = make_admission(max_queued=1, on_change=lambda requests, tokens: seen.append(requests))
    reservations = [reserve(admission) for _ in range(3)]
    refused = refusal(admission)
    assert refused.status == 503
    assert refused.body["error"]["code"] == "queue_full"
    assert retry_after(refused) >= 1
    reservations.pop().release()
    reserve(admission)
    assert max(seen) == 3 and admission.num_admitted == 3


def stats_with_used(share, running=1, **more):
    """Engine stats in which running answers hold this share of the KV cache."""
    return EngineStats(running=running, kv_utilization=share, **more)


def is_refused(stats, prompt_tokens, *, info=INFO, num_answers=1, unseen=None, priority=0):
    """Whether a request with no answer to speak of is refused for memory pressure."""
    demand = kv_demand(info, stats, unseen or Claim())
    return is_short_of_memory(info, demand, Claim(num_answers, prompt_tokens), priority)


@pytest.mark.parametrize(
    ("share", "prompt_tokens", "is_admitted"),
    [(0.5, 45, True), (0.5, 46, False), (0.96, 0, False), (0.0, 95, True)],
)
def test_a_prompt_that_would_fill_more_than_95_percent_of_the_cache_is_refused(
    share, prompt_tokens, is_admitted
):
    admission, stats = make_admission(), stats_with_used(share)
    if is_admitted:
        reservation = reserve(admission, INFO, stats, 0, prompt_tokens=prompt_tokens)
        reservation.set_answers(answers(prompt_tokens), stats)
        return
    refused = refusal(admission, info=INFO, stats=stats, priority=0, prompt_tokens=prompt_tokens)
    assert (refused.status, refused.body["error"]["code"]) == (503, "memory_pressure")
    assert retry_after(refused) >= 1
    late = reserve(admission, INFO, IDLE, 0)  # nothing runs yet; nothing is known of its prompt
    with pytest.raises(ApiError, match=f"{share:.0%} of the KV cache"):
        late.set_answers(answers(prompt_tokens), stats)


def test_running_answers_are_counted_with_what_they_are_expected_to_grow_by():
    assert not is_refused(stats_with_used(0.5, growth_blocks=2), 25)
    assert is_refused(stats_with_used(0.5, growth_blocks=2), 26)


def test_a_request_is_counted_with_the_answer_that_such_requests_get():
    admission, stats = make_admission(), stats_with_used(0.5)
    refused = refusal(admission, info=INFO, stats=stats, priority=0, prompt_tokens=20, max_tokens=30)
    assert refused.body["error"]["code"] == "memory_pressure", "nothing is known of answers: up to max_tokens"
    for _ in range(30):
        admission.learn_answer(AnswerLimits(20, 30), 5)
    reserve(admission, INFO, stats, 0, prompt_tokens=20, max_tokens=30)
    for _ in range(30):
        admission.learn_answer(AnswerLimits(20, 30), 30)
    reserve(make_admission(), INFO, stats, 0, prompt_tokens=20, max_tokens=25)  # never more than max_tokens


def test_before_the_first_answer_ends_a_request_without_max_tokens_is_not_expected_to_fill_the_context():
    info = EngineInfo(max_model_len=100_000, vocab_size=9, num_blocks=200_000, block_size=1, max_num_seqs=9)
    stats = stats_with_used(0.5)
    reserve(make_admission(), info, stats, 0, prompt_tokens=1000, max_tokens=99_000)


def test_what_was_admitted_since_the_engine_s_last_word_is_counted():
    admission, stats = make_admission(), IDLE
    burst = [reserve(admission, WIDE, stats, 0, prompt_tokens=10, max_tokens=20) for _ in range(3)]
    for one in burst:
        one.set_answers(answers(10, max_tokens=20), stats)
    again = {"info": WIDE, "stats": stats, "priority": 0, "prompt_tokens": 10, "max_tokens": 20}
    assert refusal(admission, **again).body["error"]["code"] == "memory_pressure"
    burst[0].received(0)  # the engine says that it waits: it is counted there
    again["stats"] = EngineStats(waiting=1, waiting_blocks=3)
    assert refusal(admission, **again).body["error"]["code"] == "memory_pressure"
    burst[1].release()  # its client hung up
    reserve(admission, **again)
    assert refusal(admission, **again).body["error"]["code"] == "memory_pressure"


def test_a_request_that_is_alone_may_fill_the_cache():
    admission = make_admission()
    whole = reserve(admission, INFO, IDLE, 0, prompt_tokens=10, max_tokens=90)
    whole.set_answers(answers(10, max_tokens=90), IDLE)
    only_pinned = stats_with_used(0.25, running=0)
    reserve(make_admission(), INFO, only_pinned, 0).set_answers(answers(99), only_pinned)


def test_the_answers_of_a_request_grow_separately():
    stats = stats_with_used(0.1)
    again = {"info": WIDE, "stats": stats, "priority": 0, "prompt_tokens": 20, "max_tokens": 40}
    reserve(make_admission(), num_answers=1, **again)
    assert refusal(make_admission(), num_answers=2, **again).body["error"]["code"] == "memory_pressure"


def test_an_answer_is_counted_with_as_many_of_the_newest_ones_as_there_are_rows():
    full = stats_with_used(0.9, running=2)  # it takes the row of one of the two, and half of what they hold
    assert not is_refused(full, 50) and is_refused(full, 51)
    assert is_refused(full, 6, info=WIDE), "there is a row left, so it would run beside both"
    queued = Claim(5, 250)
    assert not is_refused(full, 45, unseen=queued) and is_refused(full, 46, unseen=queued)
    one_row = EngineInfo(max_model_len=1000, vocab_size=9, num_blocks=10, block_size=10, max_num_seqs=1)
    assert not is_refused(stats_with_used(0.9), 95, info=one_row, unseen=queued), "it will run alone"


def test_waiting_prompts_are_not_counted_as_used_memory():
    admission = make_admission(max_queued=100)
    for _ in range(20):  # twice what the cache holds
        stats = stats_with_used(0.5)
        reserve(admission, INFO, stats, 0, prompt_tokens=10).set_answers(answers(10), stats)
    assert admission.queued_tokens == 200


def test_an_urgent_request_is_admitted_since_it_can_preempt_others():
    stats = stats_with_used(0.99)
    reserve(make_admission(), INFO, stats, -1).set_answers(answers(50), stats)


def test_an_estimated_length_does_not_decide_that_a_prompt_never_fits():
    stats = stats_with_used(0.5)
    reserve(make_admission(), INFO, stats, 0, prompt_tokens=100)
    assert refusal(make_admission(), info=INFO, stats=stats, priority=0, prompt_tokens=99).status == 503


def test_a_prompt_that_is_estimated_beyond_the_context_takes_no_tokens_until_it_is_tokenised():
    info = EngineInfo(max_model_len=50, vocab_size=9, num_blocks=10, block_size=10, max_num_seqs=9)
    for stats in (stats_with_used(0.96), EngineStats(waiting=1, waiting_blocks=9)):
        admission = make_admission(max_queued=100, max_queued_tokens=200)
        admission.queue_tokens(90)
        asked = {"info": info, "stats": stats, "priority": 0, "prompt_tokens": 120}
        assert refusal(admission, longest_prompt=49, **asked).status == 503
        reservation = reserve(admission, longest_prompt=50, **asked)
        assert (admission.queued_tokens, admission.unseen) == (90, Claim(1, 0))
        with pytest.raises(ApiError):  # all of its prompts fit the context, and there is no room for them
            reservation.set_answers(answers(40, 40, 40), stats)
        reservation.release()
        assert (admission.queued_tokens, admission.unseen) == (90, Claim())


def test_prompt_tokens_count_as_queued_until_the_answer_begins():
    admission = make_admission(max_queued_tokens=100)
    first = reserve(admission, num_answers=2, prompt_tokens=30)
    assert admission.queued_tokens == 30, "an estimate counts from the first moment"
    first.set_answers(answers(45, 45), IDLE)
    assert admission.queued_tokens == 90
    assert refusal(admission, prompt_tokens=11).body["error"]["code"] == "queue_full"
    second = reserve(admission, prompt_tokens=1)  # an estimate that is too low
    with pytest.raises(ApiError, match="prompt tokens"):
        second.set_answers(answers(11), IDLE)
    second.release()
    first.begin(0)
    reserve(admission, prompt_tokens=11).set_answers(answers(55), IDLE)
    assert admission.queued_tokens == 100
    first.release()
    assert admission.queued_tokens == 55


def test_a_prompt_longer_than_the_limit_is_admitted_to_an_empty_queue():
    admission = make_admission(max_queued_tokens=10)
    reservation = reserve(admission, prompt_tokens=500)
    reservation.set_answers(answers(600), IDLE)
    reservation.begin(0)
    reserve(admission, prompt_tokens=500)


def test_load_is_shed_by_queued_tokens_as_by_queued_requests():
    load = Load(
        num_admitted=3, max_running=2, waiting=1, max_queued=10, queued_tokens=90, max_queued_tokens=100
    )
    assert (
        shed_reason(load, AdmissionRequest(), 0.49) == "load_shed"
        and shed_reason(load, AdmissionRequest(), 0.51) is None
    )


def test_a_client_at_its_own_limit_gets_429_and_others_are_admitted():
    admission = make_admission(max_per_client=2)
    reservation = reserve(admission, client="alice", num_answers=2)
    refused = refusal(admission, client="alice")
    assert (refused.status, refused.body["error"]["code"]) == (429, "rate_limit_exceeded")
    assert retry_after(refused) >= 1
    reserve(admission, client="bob")
    reservation.release()
    reserve(admission, client="alice")


def test_retry_after_is_the_queue_length_divided_by_the_measured_rate():
    clock = Clock()
    admission = make_admission(clock)
    reservations = [reserve(admission) for _ in range(12)]
    for _ in range(30):  # one answer in four seconds, while ten wait
        clock.now += 4.0
        reservations[0].set_answers(answers(1), IDLE)
        reservations[0].begin(0)
        reservations.pop(0).release()
        reservations.append(reserve(admission))
    assert retry_after(refusal(admission)) == pytest.approx(40, abs=1)


def test_retry_after_is_a_guess_without_a_measured_rate_and_bounded_for_a_slow_one():
    clock = Clock()
    admission = make_admission(clock)
    reservations = [reserve(admission) for _ in range(12)]
    assert retry_after(refusal(admission)) == 1 + 10 // 2
    clock.now += 500.0
    for reservation in reservations[:2]:
        reservation.set_answers(answers(1), IDLE)
        reservation.begin(0)
        reservation.release()
        reserve(admission)
    assert retry_after(refusal(admission)) == 60


def retry_after_at_rate(gap, num_answers=20, stall=0.0):
    """retry-after while an answer finishes every `gap` seconds and another request reserves after each."""
    clock = Clock()
    admission = make_admission(clock)
    reservations = [reserve(admission) for _ in range(12)]
    for _ in range(num_answers):
        clock.now += gap / 2
        reservations[0].set_answers(answers(1), IDLE)
        reservations[0].begin(0)
        reservations.pop(0).release()
        clock.now += gap / 2
        reservations.append(reserve(admission))
    clock.now += stall
    return retry_after(refusal(admission))


def test_a_lower_rate_never_gives_a_smaller_retry_after():
    values = [retry_after_at_rate(gap) for gap in (0.01, 0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 1e3, 1e6)]
    assert values == sorted(values) and values[0] == 1
    assert values[7:] == [60] * 6  # ten wait: 200 seconds and more


def test_time_without_a_finished_answer_makes_retry_after_longer():
    values = [retry_after_at_rate(0.05, stall=stall) for stall in (0, 1, 5, 30, 600, 1e6)]
    assert values == sorted(values) and values[0] == 1 and values[-2:] == [60, 60]
    before_the_first = [retry_after_at_rate(1, num_answers=0, stall=stall) for stall in (0, 3, 20, 600)]
    assert before_the_first == [6, 6, 20, 60]


def test_idle_time_does_not_lower_the_measured_rate():
    rate = ServiceRate()
    for second in range(10):
        rate.observe(float(second), 1, is_waiting=True)
    busy = rate.seconds_for(9.0, 5, guess=0)
    rate.observe(10.0, 1, is_waiting=False)
    rate.observe(5000.0, 3, is_waiting=False)
    rate.observe(6000.0, 0, is_waiting=True)
    assert rate.seconds_for(6000.0, 5, guess=0) == pytest.approx(busy) == pytest.approx(5)


def test_the_rate_follows_a_server_that_slows_down():
    rate = ServiceRate()
    for second in range(200):
        rate.observe(float(second), 10, is_waiting=True)
    for second in range(200, 400, 4):
        rate.observe(float(second), 1, is_waiting=True)
    assert 30 < rate.seconds_for(396.0, 10, guess=0) < 41


arrivals = st.tuples(
    st.integers(1, 3),  # answers
    st.integers(0, 50),  # tokens, as estimated
    st.lists(st.integers(1, 40), min_size=3, max_size=3),  # tokens of each prompt
    st.integers(0, 3),  # how many answers begin
    st.sampled_from(["alice", "bob"]),
)


@given(st.lists(arrivals, max_size=12), st.randoms(use_true_random=False))
def test_reservations_released_in_any_order_leave_all_counters_at_zero(arriving, rng):
    admission = make_admission(max_queued=5, max_queued_tokens=120, max_per_client=6)
    reserved = []
    for num_answers, estimate, prompts, num_begun, client in arriving:
        try:
            reservation = reserve(admission, num_answers=num_answers, prompt_tokens=estimate, client=client)
        except ApiError:
            continue
        reserved.append(reservation)
        try:
            reservation.set_answers(answers(*prompts[:num_answers]), IDLE)
        except ApiError:
            reserved.remove(reservation)
            reservation.release()
            continue
        for answer in range(min(num_begun, num_answers)):
            reservation.begin(answer)
        if rng.random() < 0.5:
            reserved.pop(rng.randrange(len(reserved))).release()
    while reserved:
        reserved.pop(rng.randrange(len(reserved))).release()
    counters = admission.num_admitted, admission.queued_tokens, dict(admission._per_client), admission.unseen
    assert counters == (0, 0, {}, Claim())


def test_answers_to_one_prompt_claim_the_memory_that_they_share_once():
    shared = replace(WIDE, shares_prompts=True)
    busy = EngineStats(running=1, kv_utilization=0.1)
    many = {"num_answers": 4, "prompt_tokens": 4 * 24, "priority": 0}
    assert refusal(make_admission(), info=WIDE, stats=busy, **many).code == "memory_pressure"
    reserve(make_admission(), info=shared, stats=busy, **many)
    apart = {**many, "num_prompts": 4}
    assert refusal(make_admission(), info=shared, stats=busy, **apart).code == "memory_pressure"
