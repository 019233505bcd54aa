"""Requests that wait are released in order, one client after the other, as long as there is room."""

import random

from quire_gateway.hold_queue import HeldRequest, HoldQueue


class Waiting:
    """A queue, and the names of those that were released."""

    def __init__(self, *names, avoided=()):
        self.queue, self.released, self.held = HoldQueue(), [], {}
        for name in names:
            self.add(name, avoided)

    def add(self, name, avoided=()):
        """``name``: the client, and a number."""
        self.held[name] = HeldRequest(
            name[0], lambda: self.released.append(name), lambda replicas: not set(replicas) <= {*avoided}
        )
        self.queue.add(self.held[name])


def test_no_more_are_released_than_there_is_room_for():
    waiting = Waiting("a1", "a2", "a3")
    assert waiting.queue.release(2, ["pod"]) == 2
    assert (waiting.released, len(waiting.queue)) == (["a1", "a2"], 1)
    assert waiting.queue.release(0, ["pod"]) == waiting.queue.release(-3, ["pod"]) == 0
    assert waiting.queue.release(5, ["pod"]) == 1 and len(waiting.queue) == 0


def test_without_a_replica_none_is_released():
    waiting = Waiting("a1")
    assert waiting.queue.release(5, []) == 0 and len(waiting.queue) == 1


def test_a_client_with_many_requests_does_not_keep_another_one_waiting():
    waiting = Waiting("a1", "a2", "a3", "a4", "b1", "c1")
    for _ in range(6):
        waiting.queue.release(1, ["pod"])
    assert waiting.released == ["a1", "b1", "c1", "a2", "a3", "a4"]


def test_one_that_avoids_all_replicas_keeps_no_other_one_waiting():
    waiting = Waiting("a1", avoided=["old"])
    waiting.add("a2")
    waiting.add("b1", avoided=["old"])
    assert waiting.queue.release(5, ["old"]) == 1 and waiting.released == ["a2"]
    assert waiting.queue.release(5, ["old", "new"]) == 2


def test_one_that_has_gone_is_never_released_and_takes_no_room():
    waiting = Waiting("a1", "a2")
    waiting.queue.discard(waiting.held["a1"])
    waiting.queue.discard(waiting.held["a1"])
    assert len(waiting.queue) == 1
    assert waiting.queue.release(1, ["pod"]) == 1 and waiting.released == ["a2"]


def test_each_of_random_requests_is_released_once_and_in_its_clients_order():
    chance = random.Random(7)
    waiting = Waiting()
    added = []
    for number in range(500):
        added.append(f"{chance.choice('abcd')}{number}")
        waiting.add(added[-1])
        if chance.random() < 0.5:
            waiting.queue.release(chance.randrange(3), ["pod"])
    waiting.queue.release(1000, ["pod"])
    assert sorted(waiting.released) == sorted(added)
    for client in "abcd":
        mine = [one for one in waiting.released if one[0] == client]
        assert mine == [one for one in added if one[0] == client]
