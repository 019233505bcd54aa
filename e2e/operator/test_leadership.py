"""Two replicas: one leads, the other takes over, and a leader that lost its Lease writes nothing more."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from e2e.operator.process import OperatorProcess
from e2e.operator.world import World
from e2e.waiting import eventually

pytestmark = [pytest.mark.api, pytest.mark.timeout(180)]

Start = Callable[..., OperatorProcess]

# Longer than the default, so that a busy machine does not decide whether an expiry was waited for.
LONG_SECONDS = 60
# Shorter than the defaults, so that an expiry is seen in seconds; the ratios are the same.
SHORT = {
    "QUIRE_LEASE_DURATION_SECONDS": "5",
    "QUIRE_LEASE_RENEW_DEADLINE_SECONDS": "3",
    "QUIRE_LEASE_RETRY_SECONDS": "1",
}


def mends(world: World, namespace: str) -> bool:
    service = world.get("Service", namespace, "m")
    return service is not None and service["spec"]["selector"]["serving.quire.dev/name"] == "m"


def break_service(world: World, namespace: str) -> None:
    world.patch("Service", namespace, "m", {"spec": {"selector": {"serving.quire.dev/name": "else"}}})


def two(
    world: World, namespace: str, start: Start, **environ: str
) -> tuple[OperatorProcess, OperatorProcess]:
    """A leader, a running standby, and an LLMDeployment with its children."""
    leader = start(f"a-{namespace[-8:]}", **environ).wait_leading(world)
    standby = start(f"b-{namespace[-8:]}", **environ)
    eventually("the standby answers its probes", lambda: standby.ask("/readyz")[0] == 200)
    world.deploy(namespace, "m")
    eventually("all children", lambda: world.has_children(namespace, "m"))
    return leader, standby


@pytest.mark.chaos(8, fault="SIGTERM to the leader", proof="exit code 0")
def test_a_standby_answers_its_probes_and_takes_over_long_before_the_lease_of_an_ended_leader_expires(
    world: World, namespace: str, start: Start
) -> None:
    leader, standby = two(world, namespace, start, QUIRE_LEASE_DURATION_SECONDS=str(LONG_SECONDS))
    assert [p.ask("/healthz")[0] for p in (leader, standby)] == [200, 200]
    assert "quire_operator_leader 1.0" in leader.ask("/metrics")[1]
    assert "quire_operator_leader 0.0" in standby.ask("/metrics")[1]

    leader.send(signal.SIGTERM)
    started = time.monotonic()
    eventually("the standby leads", lambda: world.lease_holder() == standby.name)
    leads = time.monotonic() - started
    break_service(world, namespace)
    eventually("the new leader mends", lambda: mends(world, namespace))
    works = time.monotonic() - started

    assert leader.wait(15) == 0
    print(f"\n  takeover after SIGTERM: Lease {leads:.2f} s, working {works:.2f} s")
    assert works <= LONG_SECONDS / 2, "two seconds on a machine that does nothing else"


@pytest.mark.deep
@pytest.mark.chaos(8, fault="SIGKILL to the leader", proof="the Lease expires")
def test_a_killed_leader_is_replaced_when_its_lease_expires(
    world: World, namespace: str, start: Start
) -> None:
    leader, standby = two(world, namespace, start, **SHORT)

    leader.kill()
    killed = time.monotonic()
    break_service(world, namespace)
    eventually("the standby mends", lambda: mends(world, namespace))

    assert world.lease_holder() == standby.name
    assert time.monotonic() - killed <= 3 * int(SHORT["QUIRE_LEASE_DURATION_SECONDS"])


@pytest.mark.deep
@pytest.mark.chaos(8, fault="SIGSTOP to the leader until another leads, then SIGCONT", proof="exit code 1")
def test_a_leader_suspended_past_its_lease_exits_without_writing(
    world: World, namespace: str, start: Start
) -> None:
    leader, standby = two(world, namespace, start, **SHORT)
    leader.suspend()
    eventually("the standby leads", lambda: world.lease_holder() == standby.name)
    standby.suspend()  # every write from now on would come from the old leader
    before = world.writes()

    break_service(world, namespace)
    leader.send(signal.SIGCONT)

    assert leader.wait(15) == 1
    new = [what for what in world.writes() - before if " leases " not in what]  # the refused renewal
    assert new == [], leader.tail()
    standby.send(signal.SIGCONT)


def test_two_replicas_started_at_once_elect_one_leader(world: World, namespace: str, start: Start) -> None:
    both = [start(f"{letter}-{namespace[-8:]}") for letter in "xy"]
    eventually("one leads", lambda: world.lease_holder() in {p.name for p in both})
    until = time.monotonic() + 3
    while time.monotonic() < until:
        assert sum("quire_operator_leader 1.0" in p.ask("/metrics")[1] for p in both) <= 1
        time.sleep(0.2)
