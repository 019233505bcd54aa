"""The API server does not answer for more than a minute: the operator stays up and healthy, and catches up.

test_missing_rights.py takes as long: they are two files so that they can run in parallel.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from e2e.cluster.apiserver import ApiServer
from e2e.operator.process import OperatorProcess
from e2e.operator.world import World
from e2e.waiting import eventually

pytestmark = [pytest.mark.api, pytest.mark.timeout(240)]

OUTAGE_SECONDS = 65


@pytest.mark.deep
@pytest.mark.chaos(2, fault=f"kube-apiserver silent for {OUTAGE_SECONDS} s", proof="it leads no more")
def test_the_operator_survives_a_minute_without_answers_of_the_api_server(
    server: ApiServer, world: World, namespace: str, start: Callable[..., OperatorProcess]
) -> None:
    operator = start("outage").wait_leading(world)
    world.deploy(namespace, "before")
    eventually("all children", lambda: world.has_children(namespace, "before"))

    with server.silenced():
        until = time.monotonic() + OUTAGE_SECONDS
        while time.monotonic() < until:
            assert operator.code is None, operator.tail()
            assert operator.ask("/healthz")[0] == 200
            time.sleep(1)
        # Past the renew deadline it cannot know that it leads, so it must not believe it.
        assert "quire_operator_leader 0.0" in operator.ask("/metrics")[1]

    eventually("the API server answers", lambda: world.find("LLMDeployment", namespace))
    back = time.monotonic()
    world.deploy(namespace, "after")
    eventually("a new LLMDeployment is served", lambda: world.has_children(namespace, "after"))

    print(f"\n  caught up {time.monotonic() - back:.1f} s after the API server was back")
    assert time.monotonic() - back <= 15
    assert operator.code is None
