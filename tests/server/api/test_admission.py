"""The bounded house."""

import pytest

from quire_server.api.admission import Admission, Load, shed_reason
from quire_server.api.errors import ApiError
from quire_server.engine.messages import EngineInfo, EngineStats

INFO = EngineInfo(max_model_len=1000, vocab_size=9, num_blocks=10, block_size=10, max_num_seqs=2)
IDLE = EngineStats()


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
    assert shed_reason(load, newcomers, dice) == reason


def test_a_house_without_a_queue_takes_what_it_can_run():
    assert shed_reason(Load(1, 2, 0, 0), 1, 0.0) is None
    assert shed_reason(Load(2, 2, 0, 0), 1, 0.99) == "queue_full"


def test_places_are_reserved_at_once_and_given_back():
    seen = []
    house = Admission(max_queued=1, on_change=seen.append)
    places = [house.reserve(1, INFO, IDLE) for _ in range(3)]
    with pytest.raises(ApiError) as refused:
        house.reserve(1, INFO, IDLE)
    assert refused.value.status == 503
    assert refused.value.body["error"]["code"] == "queue_full"
    assert int(dict(refused.value.headers)["retry-after"]) >= 1
    places.pop().leave()
    house.reserve(1, INFO, IDLE)
    assert seen == [1, 2, 3, 2, 3]


def test_memory_pressure_is_for_those_who_have_company():
    house = Admission(max_queued=10, on_change=lambda n: None)
    alone = house.reserve(1, INFO, IDLE)
    alone.hold(90)
    alone.grow(9)
    late = house.reserve(1, INFO, IDLE)
    with pytest.raises(ApiError) as refused:
        late.hold(1)
    assert refused.value.body["error"]["code"] == "memory_pressure"
    late.leave()
    alone.leave()
    assert (house.in_house, house.tokens) == (0, 0)
    house.reserve(1, INFO, IDLE).hold(99)
