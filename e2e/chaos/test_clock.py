"""The wall clock jumps ten minutes ahead and back: no replica loses or takes a Lease by it."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from e2e.chaos.children import Body
from e2e.chaos.conftest import CREATED, settled
from e2e.operator.process import OperatorProcess
from e2e.operator.world import OPERATOR_NAMESPACE, World
from e2e.waiting import eventually

WATCH_SECONDS = 20  # longer than a Lease lasts


@pytest.mark.timeout(180)
@pytest.mark.chaos(15, fault="the leader's wall clock jumps by ten minutes", proof="renewTime of its Lease")
@pytest.mark.parametrize("minutes", [10, -10], ids=["ahead", "back"])
def test_a_jump_of_the_wall_clock_changes_no_leader_and_stops_no_reconcile(
    minutes: int,
    world: World,
    namespace: str,
    start: Callable[..., OperatorProcess],
    libfaketime: str,
    tmp_path: Path,
    undisturbed: dict[str, dict[str, Body]],
) -> None:
    clock = tmp_path / "clock"
    clock.write_text("+0")
    faked = {
        "LD_PRELOAD": libfaketime,
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    leader = start("jumper", QUIRE_WATCH_NAMESPACES=namespace, **faked).wait_leading(world)
    standby = start("steady", QUIRE_WATCH_NAMESPACES=namespace)
    eventually("the standby is up", lambda: standby.ask("/readyz")[0] == 200)
    world.deploy(namespace, "m", **CREATED)
    settled(world, namespace)

    clock.write_text(f"{minutes:+d}m")
    eventually("the clock has jumped", lambda: abs(drift(world) - 60 * minutes) < 30)
    until = time.monotonic() + WATCH_SECONDS
    while time.monotonic() < until:
        assert leader.code is None and standby.code is None
        assert world.lease_holder() == leader.name
        assert "quire_operator_leader 0.0" in standby.ask("/metrics")[1]
        assert leader.ask("/healthz")[0] == 200
        time.sleep(1)
    world.delete("Service", namespace, "m")
    eventually("it is back", lambda: world.get("Service", namespace, "m"))
    assert settled(world, namespace) == undisturbed["created"]

    leader.kill()
    eventually("the standby leads", lambda: world.lease_holder() == standby.name)


def drift(world: World) -> float:
    """Seconds by which the leader's last renewal is ahead of now."""
    lease = world.read("Lease", OPERATOR_NAMESPACE, "quire-operator")
    renewed = datetime.fromisoformat(str(lease["spec"]["renewTime"]))
    return (renewed - datetime.now(UTC)).total_seconds()
