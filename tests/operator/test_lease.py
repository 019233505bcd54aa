"""The Lease has one holder at a time, whatever the clock, the network or the process does."""

from __future__ import annotations

from typing import Any

import pytest

from quire_operator.cluster import ConflictError, NotFoundError, UnreachableError
from quire_operator.lease import Election, LeadershipLostError, NotLeadingError, Terms


class FakeLease:
    """One Lease with resource versions; `down` makes every request fail."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.down = False
        self.lose_answer = False

    @property
    def holder(self) -> str:
        return "" if self.lease is None else self.lease["spec"]["holderIdentity"]

    async def read(self) -> dict[str, Any] | None:
        self._check()
        return self.lease

    async def create(self, spec: dict[str, Any]) -> dict[str, Any]:
        self._check()
        if self.lease is not None:
            raise ConflictError("exists")
        return self._store(spec)

    async def replace(self, lease: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
        self._check()
        if self.lease is None:
            raise NotFoundError("gone")
        if lease["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise ConflictError("changed")
        stored = self._store(spec)
        if self.lose_answer:
            self.lose_answer = False
            raise UnreachableError("the answer was lost")
        return stored

    def _store(self, spec: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        self.lease = {"metadata": {"name": "l", "resourceVersion": str(self.version)}, "spec": spec}
        return self.lease

    def _check(self) -> None:
        if self.down:
            raise UnreachableError("down")


class Enough(Exception):
    """Ends a loop that never ends by itself."""


class HandTime:
    """A clock that only `sleep` and the test move; `turns` ends the loops."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.turns = 0

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        if self.turns <= 0:
            raise Enough
        self.turns -= 1
        self.now += seconds


@pytest.fixture
def api() -> FakeLease:
    return FakeLease()


@pytest.fixture
def time() -> HandTime:
    return HandTime()


def replica(api: FakeLease, time: HandTime, name: str) -> Election:
    return Election(api, identity=name, terms=Terms(), clock=time.clock, sleep=time.sleep)


async def tries(election: Election, time: HandTime, turns: int) -> bool:
    time.turns = turns
    try:
        await election.acquire()
    except Enough:
        return False
    return True


async def renews(election: Election, time: HandTime, turns: int) -> None:
    time.turns = turns
    with pytest.raises(Enough):
        await election.hold()


async def test_the_first_takes_it_and_the_second_waits(api: FakeLease, time: HandTime) -> None:
    first, second = replica(api, time, "a"), replica(api, time, "b")

    assert await tries(first, time, 0)
    assert not await tries(second, time, 5)
    assert (first.leads, second.leads) == (True, False)
    with pytest.raises(NotLeadingError):
        second.fence()


async def test_a_lease_that_is_not_renewed_is_taken_after_its_duration_and_not_before(
    api: FakeLease, time: HandTime
) -> None:
    first, second = replica(api, time, "a"), replica(api, time, "b")
    await tries(first, time, 0)
    start = time.now

    assert await tries(second, time, 100)

    assert 15 <= time.now - start <= 17
    assert api.lease is not None and api.lease["spec"]["leaseTransitions"] == 2


async def test_a_lease_that_is_renewed_is_never_taken(api: FakeLease, time: HandTime) -> None:
    first, second = replica(api, time, "a"), replica(api, time, "b")
    await tries(first, time, 0)
    for _ in range(20):
        await renews(first, time, 1)
        assert not await tries(second, time, 2)


async def test_a_released_lease_is_taken_at_the_next_attempt(api: FakeLease, time: HandTime) -> None:
    first, second = replica(api, time, "a"), replica(api, time, "b")
    await tries(first, time, 0)
    assert not await tries(second, time, 1)

    await first.release()

    assert not first.leads
    assert await tries(second, time, 0)


@pytest.mark.parametrize(("written_by", "left_to"), [("a", ""), ("b", "b")])
async def test_a_lease_that_was_written_meanwhile_is_given_back_if_it_is_still_its_own(
    api: FakeLease, time: HandTime, written_by: str, left_to: str
) -> None:
    leader = replica(api, time, "a")
    await tries(leader, time, 0)
    assert api.lease is not None
    await api.replace(api.lease, api.lease["spec"] | {"holderIdentity": written_by})

    await leader.release()

    assert api.holder == left_to


async def test_a_process_that_comes_back_under_the_same_name_does_not_wait(
    api: FakeLease, time: HandTime
) -> None:
    await tries(replica(api, time, "a"), time, 0)

    assert await tries(replica(api, time, "a"), time, 0)


async def test_a_leader_that_cannot_renew_stops_writing_before_another_could_start(
    api: FakeLease, time: HandTime
) -> None:
    leader = replica(api, time, "a")
    await tries(leader, time, 0)
    api.down = True

    await renews(leader, time, 4)
    assert leader.leads, "8 s are within the renew deadline"
    await renews(leader, time, 1)
    assert not leader.leads

    api.down = False
    await renews(leader, time, 1)
    assert leader.leads, "the Lease is still its own"


async def test_a_leader_that_slept_does_not_believe_that_it_leads(api: FakeLease, time: HandTime) -> None:
    leader, other = replica(api, time, "a"), replica(api, time, "b")
    await tries(leader, time, 0)
    await tries(other, time, 100)

    with pytest.raises(NotLeadingError):
        leader.fence()
    time.turns = 1
    with pytest.raises(LeadershipLostError):
        await leader.hold()


async def test_a_deleted_lease_is_a_lost_lease(api: FakeLease, time: HandTime) -> None:
    leader = replica(api, time, "a")
    await tries(leader, time, 0)
    api.lease = None

    time.turns = 1
    with pytest.raises(LeadershipLostError):
        await leader.hold()


async def test_a_renewal_whose_answer_was_lost_is_found_to_be_our_own(api: FakeLease, time: HandTime) -> None:
    leader = replica(api, time, "a")
    await tries(leader, time, 0)
    api.lose_answer = True

    await renews(leader, time, 3)

    assert leader.leads and api.holder == "a"


async def test_a_standby_survives_an_api_server_that_is_away(api: FakeLease, time: HandTime) -> None:
    standby = replica(api, time, "b")
    api.down = True
    assert not await tries(standby, time, 3)
    api.down = False

    assert await tries(standby, time, 0)


def test_a_request_is_shorter_than_half_of_the_renew_deadline() -> None:
    assert Terms().request < Terms().renew_deadline / 2
