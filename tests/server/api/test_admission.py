"""The bounded house."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_server.api.admission import Admission, Limits, Load, Newcomer, shed_reason
from quire_server.api.errors import ApiError
from quire_server.api.service_rate import ServiceRate
from quire_server.core.engine_stats import EngineStats
from quire_server.engine.messages import EngineInfo

INFO = EngineInfo(max_model_len=1000, vocab_size=9, num_blocks=10, block_size=10, max_num_seqs=2)
LARGE = EngineInfo(max_model_len=1000, vocab_size=9, num_blocks=10**6, block_size=10, max_num_seqs=2)
IDLE = EngineStats()


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def make_house(clock=None, on_change=lambda requests, tokens: None, **limits):
    return Admission(Limits(**{"max_queued": 10, **limits}), clock or Clock(), on_change)


def knock(house, info=LARGE, stats=IDLE, priority=-1, **newcomer):
    """Urgent by default: no dice are thrown for it."""
    return house.reserve(Newcomer(priority=priority, **newcomer), info, stats)


def refusal(house, **more):
    with pytest.raises(ApiError) as refused:
        knock(house, **more)
    return refused.value


def retry_after(error):
    return int(dict(error.headers)["retry-after"])


@pytest.mark.parametrize(
    ("in_house", "waiting", "newcomers", "dice", "reason"),
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
def test_the_queue_is_bounded_and_sheds_before_it_is_full(in_house, waiting, newcomers, dice, reason):
    load = Load(in_house=in_house, max_running=2, waiting=waiting, max_queued=10)
    assert shed_reason(load, Newcomer(num_answers=newcomers), dice) == reason


def test_low_priorities_are_shed_before_the_first_normal_one_and_high_ones_never():
    for waiting in range(11):
        load = Load(in_house=waiting + 2, max_running=2, waiting=waiting, max_queued=20)
        shed = {p: shed_reason(load, Newcomer(priority=p), 0.0) for p in (-1, 0, 1)}
        assert shed[-1] is None and shed[0] is None and shed[1] is None
    at_three_quarters = Load(in_house=17, max_running=2, waiting=15, max_queued=20)
    shed = {p: shed_reason(at_three_quarters, Newcomer(priority=p), 0.5) for p in (-1, 0, 1)}
    assert shed == {-1: None, 0: None, 1: "load_shed"}
    nearly_full = Load(in_house=21, max_running=2, waiting=19, max_queued=20)
    shed = {p: shed_reason(nearly_full, Newcomer(priority=p), 0.7) for p in (-1, 0, 1)}
    assert shed == {-1: None, 0: "load_shed", 1: "load_shed"}


@given(st.integers(0, 40), st.integers(-1, 1), st.floats(0, 1, exclude_max=True))
def test_a_more_urgent_request_is_never_shed_where_a_less_urgent_one_is_not(waiting, priority, dice):
    load = Load(in_house=waiting + 2, max_running=2, waiting=waiting, max_queued=30)
    if shed_reason(load, Newcomer(priority=priority), dice) is not None:
        assert shed_reason(load, Newcomer(priority=priority + 1), dice) is not None


def test_a_house_without_a_queue_takes_what_it_can_run():
    assert shed_reason(Load(1, 2, 0, 0), Newcomer(), 0.0) is None
    assert shed_reason(Load(2, 2, 0, 0), Newcomer(), 0.99) == "queue_full"


def test_places_are_reserved_at_once_and_given_back():
    seen = []
    house = make_house(max_queued=1, on_change=lambda requests, tokens: seen.append(requests))
    places = [knock(house) for _ in range(3)]
    refused = refusal(house)
    assert refused.status == 503
    assert refused.body["error"]["code"] == "queue_full"
    assert retry_after(refused) >= 1
    places.pop().leave()
    knock(house)
    assert max(seen) == 3 and house.in_house == 3


def using(share, running=1):
    """What the engine says when running answers hold that much of its cache."""
    return EngineStats(running=running, kv_utilization=share)


@pytest.mark.parametrize(
    ("share", "prompt_tokens", "is_let_in"),
    [(0.5, 45, True), (0.5, 46, False), (0.96, 0, False), (0.0, 95, True)],
)
def test_a_prompt_that_would_take_the_cache_beyond_95_percent_is_refused(share, prompt_tokens, is_let_in):
    house = make_house()
    if is_let_in:
        knock(house, INFO, using(share), 0, prompt_tokens=prompt_tokens).hold([prompt_tokens])
        return
    refused = refusal(house, info=INFO, stats=using(share), priority=0, prompt_tokens=prompt_tokens)
    assert (refused.status, refused.body["error"]["code"]) == (503, "memory_pressure")
    assert retry_after(refused) >= 1
    late = knock(house, INFO, IDLE, 0)  # nothing runs yet; nothing is known of its prompt
    house.reserve(Newcomer(priority=-1), INFO, using(share))
    with pytest.raises(ApiError, match=f"{share:.0%} of the KV cache"):
        late.hold([prompt_tokens])


def test_prompts_that_only_wait_take_no_memory_from_anybody():
    house = make_house(max_queued=100)
    for _ in range(20):  # twice what the cache holds
        knock(house, INFO, using(0.5), 0, prompt_tokens=10).hold([10])
    assert house.queued_tokens == 200


def test_where_nothing_runs_a_prompt_may_fill_the_cache():
    knock(make_house(), INFO, using(0.25, running=0), 0).hold([99])  # what is in use is only pinned


def test_an_urgent_request_is_let_in_to_take_the_memory_of_others():
    knock(make_house(), INFO, using(0.99), -1).hold([50])


def test_whether_a_prompt_ever_fits_is_not_decided_by_guessing_its_length():
    house = make_house()
    knock(house, INFO, using(0.5), 0, prompt_tokens=100)
    assert refusal(house, info=INFO, stats=using(0.5), priority=0, prompt_tokens=99).status == 503


def test_prompt_tokens_wait_until_the_answer_begins():
    house = make_house(max_queued_tokens=100)
    first = knock(house, num_answers=2, prompt_tokens=30)
    assert house.queued_tokens == 30, "an estimate counts from the first moment"
    first.hold([45, 45])
    assert house.queued_tokens == 90
    assert refusal(house, prompt_tokens=11).body["error"]["code"] == "queue_full"
    second = knock(house, prompt_tokens=1)  # more than it seemed:
    with pytest.raises(ApiError, match="prompt tokens"):
        second.hold([11])
    second.leave()
    first.begin(0)
    knock(house, prompt_tokens=11).hold([55])
    assert house.queued_tokens == 100
    first.leave()
    assert house.queued_tokens == 55


def test_a_prompt_longer_than_the_limit_is_served_when_nobody_waits():
    house = make_house(max_queued_tokens=10)
    place = knock(house, prompt_tokens=500)
    place.hold([600])
    place.begin(0)
    knock(house, prompt_tokens=500)


def test_a_queue_full_of_tokens_sheds_like_one_full_of_requests():
    load = Load(in_house=3, max_running=2, waiting=1, max_queued=10, queued_tokens=90, max_queued_tokens=100)
    assert shed_reason(load, Newcomer(), 0.49) == "load_shed" and shed_reason(load, Newcomer(), 0.51) is None


def test_a_client_s_own_limit_is_a_429_and_hurts_nobody_else():
    house = make_house(max_per_client=2)
    place = knock(house, client="alice", num_answers=2)
    refused = refusal(house, client="alice")
    assert (refused.status, refused.body["error"]["code"]) == (429, "rate_limit_exceeded")
    assert retry_after(refused) >= 1
    knock(house, client="bob")
    place.leave()
    knock(house, client="alice")


def test_retry_after_is_the_queue_s_length_at_the_measured_rate():
    clock = Clock()
    house = make_house(clock)
    places = [knock(house) for _ in range(12)]
    for _ in range(30):  # one answer in four seconds, while ten wait
        clock.now += 4.0
        places[0].hold([1])
        places[0].begin(0)
        places.pop(0).leave()
        places.append(knock(house))
    assert retry_after(refusal(house)) == pytest.approx(40, abs=1)


def test_retry_after_of_an_unmeasured_house_is_a_guess_and_of_a_slow_one_bounded():
    clock = Clock()
    house = make_house(clock)
    places = [knock(house) for _ in range(12)]
    assert retry_after(refusal(house)) == 1 + 10 // 2
    clock.now += 500.0
    for place in places[:2]:
        place.hold([1])
        place.begin(0)
        place.leave()
        knock(house)
    assert retry_after(refusal(house)) == 60


def retry_after_of_a_drain(gap, num_answers=20, stall=0.0):
    """What a client is told while one answer leaves in `gap` seconds, and somebody knocks in between."""
    clock = Clock()
    house = make_house(clock)
    places = [knock(house) for _ in range(12)]
    for _ in range(num_answers):
        clock.now += gap / 2
        places[0].hold([1])
        places[0].begin(0)
        places.pop(0).leave()
        clock.now += gap / 2
        places.append(knock(house))
    clock.now += stall
    return retry_after(refusal(house))


def test_a_slower_drain_never_gives_a_smaller_retry_after():
    told = [retry_after_of_a_drain(gap) for gap in (0.01, 0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 1e3, 1e6)]
    assert told == sorted(told) and told[0] == 1
    assert told[7:] == [60] * 6  # ten wait: 200 seconds and more


def test_time_in_which_no_answer_leaves_makes_retry_after_longer():
    told = [retry_after_of_a_drain(0.05, stall=stall) for stall in (0, 1, 5, 30, 600, 1e6)]
    assert told == sorted(told) and told[0] == 1 and told[-2:] == [60, 60]
    before_the_first = [retry_after_of_a_drain(1, num_answers=0, stall=stall) for stall in (0, 3, 20, 600)]
    assert before_the_first == [6, 6, 20, 60]


def test_idle_time_does_not_make_a_server_seem_slow():
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


visits = st.tuples(
    st.integers(1, 3),  # answers
    st.integers(0, 50),  # tokens, as estimated
    st.lists(st.integers(1, 40), min_size=3, max_size=3),  # tokens of each prompt
    st.integers(0, 3),  # how many answers begin
    st.sampled_from(["alice", "bob"]),
)


@given(st.lists(visits, max_size=12), st.randoms(use_true_random=False))
def test_whoever_comes_and_goes_in_any_order_leaves_an_empty_house(visiting, rng):
    house = make_house(max_queued=5, max_queued_tokens=120, max_per_client=6)
    inside = []
    for num_answers, estimate, prompts, num_begun, client in visiting:
        try:
            place = knock(house, num_answers=num_answers, prompt_tokens=estimate, client=client)
        except ApiError:
            continue
        inside.append(place)
        try:
            place.hold(prompts[:num_answers])
        except ApiError:
            inside.remove(place)
            place.leave()
            continue
        for answer in range(min(num_begun, num_answers)):
            place.begin(answer)
        if rng.random() < 0.5:
            inside.pop(rng.randrange(len(inside))).leave()
    while inside:
        inside.pop(rng.randrange(len(inside))).leave()
    assert (house.in_house, house.queued_tokens, dict(house._per_client)) == (0, 0, {})
