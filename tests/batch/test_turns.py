"""Clients share a worker, however many batches each of them has."""

from collections import Counter

from quire_batch.records import Running
from quire_batch.turns import in_turns

ALICE = [Running(f"a{number}", "alice", is_job=False) for number in range(9)]
BOB = [Running("b", "bob", is_job=True)]


def test_each_client_is_first_as_often_and_so_is_each_of_its_batches():
    first = [in_turns([*ALICE, *BOB], turn)[0] for turn in range(36)]
    assert Counter(one.owner for one in first) == {"alice": 18, "bob": 18}
    assert {one.id for one in first if one.owner == "alice"} == {one.id for one in ALICE}


def test_none_is_left_out_and_a_client_is_never_behind_two_of_another_one():
    assert in_turns([], 3) == []
    for turn in range(20):
        found = in_turns([*ALICE, *BOB], turn)
        assert sorted(one.id for one in found) == sorted(one.id for one in [*ALICE, *BOB])
        assert found.index(BOB[0]) <= 1


def test_jobs_of_a_client_are_one_lane_and_batches_have_their_own():
    jobs = [Running(str(number), "alice", is_job=True) for number in range(3)]
    assert len({one.lane for one in jobs}) == 1
    assert len({one.lane for one in ALICE}) == len(ALICE)
