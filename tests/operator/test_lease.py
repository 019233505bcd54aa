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


class TurnsExhausted(Exception):
    """Ends a loop that never ends by itself."""


class FakeTime:
    """A clock that only `sleep` and the test move; `turns` ends the loops."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.turns = 0

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        if self.turns <= 0:
            raise TurnsExhausted
        self.turns -= 1
        self.now += seconds


@pytest.fixture
def api() -> FakeLease:
    return FakeLease()


@pytest.fixture
def time() -> FakeTime:
    return FakeTime()


def replica(api: FakeLease, time: FakeTime, name: str) -> Election:
    return Election(api, identity=name, terms=Terms(), clock=time.clock, sleep=time.sleep)


async def tries(election: Election, time: FakeTime, turns: int) -> bool:
    time.turns = turns
    try:
        await election.acquire()
    except TurnsExhausted:
        return False
    return True


async def renews(election: Election, time: FakeTime, turns: int) -> None:
    time.turns = turns
    with pytest.raises(TurnsExhausted):
        await election.hold()


async def test_the_first_replica_acquires_the_lease_and_the_second_waits(
    api: FakeLease, time: FakeTime
) -> None:
    first, second = replica(api, time, "a"), replica(api, time, "b")

    assert await tries(first, time, 0)
    assert not await tries(second, time, 5)
    assert (first.leads, second.leads) == (True, False)
    with pytest.raises(NotLeadingError):
        second.fence()


async def test_an_unrenewed_lease_is_acquired_after_its_duration_and_not_before(
    api: FakeLease, time: FakeTime
) -> None:
    first, second = replica(api, time, "a"), replica(api, time, "b")
    await tries(first, time, 0)
    start = time.now

    assert await tries(second, time, 100)

    assert 15 <= time.now - start <= 17
    assert api.lease is not None and api.lease["spec"]["leaseTransitions"] == 2


async def test_a_renewed_lease_is_never_acquired_by_another_replica(api: FakeLease, time: FakeTime) -> None:
    first, second = replica(api, time, "a"), replica(api, time, "b")
    await tries(first, time, 0)
    for _ in range(20):
        await renews(first, time, 1)
        assert not await tries(second, time, 2)


async def test_a_released_lease_is_acquired_at_the_next_attempt(api: FakeLease, time: FakeTime) -> None:
    first, second = replica(api, time, "a"), replica(api, time, "b")
    await tries(first, time, 0)
    assert not await tries(second, time, 1)

    await first.release()

    assert not first.leads
    assert await tries(second, time, 0)


@pytest.mark.parametrize(("written_by", "left_to"), [("a", ""), ("b", "b")])
async def test_a_lease_that_was_written_meanwhile_is_released_only_by_its_holder(
    api: FakeLease, time: FakeTime, written_by: str, left_to: str
) -> None:
    leader = replica(api, time, "a")
    await tries(leader, time, 0)
    assert api.lease is not None
    await api.replace(api.lease, api.lease["spec"] | {"holderIdentity": written_by})

    await leader.release()

    assert api.holder == left_to


async def test_a_restarted_process_with_the_same_identity_acquires_its_lease_at_once(
    api: FakeLease, time: FakeTime
) -> None:
    await tries(replica(api, time, "a"), time, 0)

    assert await tries(replica(api, time, "a"), time, 0)


async def test_a_leader_that_cannot_renew_stops_leading_at_the_renew_deadline(
    api: FakeLease, time: FakeTime
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


async def test_a_leader_that_was_suspended_past_its_lease_does_not_lead(
    api: FakeLease, time: FakeTime
) -> None:
    leader, other = replica(api, time, "a"), replica(api, time, "b")
    await tries(leader, time, 0)
    await tries(other, time, 100)

    with pytest.raises(NotLeadingError):
        leader.fence()
    time.turns = 1
    with pytest.raises(LeadershipLostError):
        await leader.hold()


async def test_a_deleted_lease_ends_the_leadership(api: FakeLease, time: FakeTime) -> None:
    leader = replica(api, time, "a")
    await tries(leader, time, 0)
    api.lease = None

    time.turns = 1
    with pytest.raises(LeadershipLostError):
        await leader.hold()


async def test_a_renewal_whose_response_was_lost_keeps_the_leadership(api: FakeLease, time: FakeTime) -> None:
    leader = replica(api, time, "a")
    await tries(leader, time, 0)
    api.lose_answer = True

    await renews(leader, time, 3)

    assert leader.leads and api.holder == "a"


async def test_a_standby_survives_an_unavailable_api_server(api: FakeLease, time: FakeTime) -> None:
    standby = replica(api, time, "b")
    api.down = True
    assert not await tries(standby, time, 3)
    api.down = False

    assert await tries(standby, time, 0)


async def test_of_two_replicas_that_acquire_at_once_only_one_leads(api: FakeLease, time: FakeTime) -> None:
    first, second = replica(api, time, "a"), replica(api, time, "b")

    async def read_before_the_other_writes() -> None:
        await tries(second, time, 0)

    read = api.read

    async def late() -> dict[str, Any] | None:
        seen = await read()
        api.read = read  # type: ignore[method-assign]
        await read_before_the_other_writes()
        return seen

    api.read = late  # type: ignore[method-assign]

    assert not await tries(first, time, 0)
    assert (first.leads, second.leads, api.holder) == (False, True, "b")


async def test_a_lease_that_cannot_be_released_is_left_to_expire(
    api: FakeLease, time: FakeTime, caplog: pytest.LogCaptureFixture
) -> None:
    leader = replica(api, time, "a")
    await tries(leader, time, 0)
    api.down = True

    await leader.release()

    assert not leader.leads
    assert api.holder == "a" and "was not released and will expire" in caplog.text


def test_the_request_timeout_is_shorter_than_half_of_the_renew_deadline() -> None:
    assert Terms().request < Terms().renew_deadline / 2
