"""With spot nodes the drain fits the notice of their provider, and the status warns of a longer one."""

from __future__ import annotations

import pytest

from e2e.operator.world import Body, World
from e2e.waiting import eventually

pytestmark = [pytest.mark.api, pytest.mark.usefixtures("operator")]


def grace(world: World, namespace: str) -> int:
    deployment = eventually("the Deployment", lambda: world.get("Deployment", namespace, "m"))
    return int(deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"])


def test_the_drain_fits_the_notice_and_a_longer_one_is_reported(world: World, namespace: str) -> None:
    world.deploy(namespace, "m", scheduling={"spot": {"enabled": True}})
    assert grace(world, namespace) == 25
    world.wait_condition(namespace, "m", "DrainFitsNotice", "True", "Fits")

    longer: Body = {"spec": {"drain": {"timeoutSeconds": 60}}}
    world.patch("LLMDeployment", namespace, "m", longer)
    warning = world.wait_condition(namespace, "m", "DrainFitsNotice", "False", "DrainExceedsNotice")
    assert "75 seconds" in warning["message"] and "spec.drain.timeoutSeconds" in warning["message"]
    eventually("it is as asked for", lambda: grace(world, namespace) == 75)
    world.wait_events(namespace, "m", "DrainExceedsNotice")

    notice: Body = {"spec": {"scheduling": {"spot": {"noticeSeconds": 120}}}}
    world.patch("LLMDeployment", namespace, "m", notice)
    world.wait_condition(namespace, "m", "DrainFitsNotice", "True", "Fits")
