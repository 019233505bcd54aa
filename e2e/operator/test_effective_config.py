"""A pod that serves less than was wanted says so in /statusz, and the operator in conditions and an Event."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.operator import pods
from e2e.operator.statusz import statusz_server
from e2e.operator.world import World

pytestmark = [pytest.mark.api, pytest.mark.usefixtures("operator")]


def answer(length: int) -> dict[str, Any]:
    """The /statusz of a pod with room for so many of 8,192 tokens."""
    effective = {"maxModelLen": length, "wantedModelLen": 8192, "dtype": "bfloat16", "quantization": "int8"}
    return {"phase": "serving", "effective": {**effective, "inexactDefaults": ["quantization"]}}


def serve(world: World, namespace: str, length: int, *, revision: int = 1) -> None:
    """A pod that loads, is asked by the operator, and becomes ready."""
    with statusz_server(answer(length)) as pod:
        made = world.make_pod(namespace, "m", pods.loading(ip=pod.ip), revision=revision)
        world.roll_out(namespace, "m", ready=0, replicas=1)
        world.wait_engine(namespace, "m", maxModelLen=length)
        name = made["metadata"]["name"]
        world.patch("Pod", namespace, name, {"status": pods.ready()}, status=True)
        world.roll_out(namespace, "m", ready=1)


def test_a_reduced_context_is_a_condition_and_an_event_and_the_deployment_stays_ready(
    world: World, namespace: str
) -> None:
    world.deploy(namespace, "m")
    serve(world, namespace, 4096)

    reduced = world.wait_condition(namespace, "m", "ContextReduced", "True", "ContextReduced")
    assert "4,096 of 8,192 tokens" in reduced["message"]
    world.wait_condition(namespace, "m", "Ready", "True")
    world.wait_events(namespace, "m", "ContextReduced", "Ready")
    engine = world.status(namespace, "m")["engine"]
    assert engine["inexactDefaults"] == ["quantization"]
    assert (engine["dtype"], engine["quantization"]) == ("bfloat16", "int8")


def test_a_context_that_is_too_small_stalls_until_new_pods_have_more(world: World, namespace: str) -> None:
    world.deploy(namespace, "m", engine={"kvCache": {"memory": "4Mi"}})
    serve(world, namespace, 176)

    stalled = world.wait_condition(namespace, "m", "Stalled", "True", "ContextTooSmall")
    assert "kvCache.memory 187Mi would hold them all" in stalled["message"]
    world.wait_condition(namespace, "m", "Ready", "False", "ContextTooSmall")
    world.wait_condition(namespace, "m", "Available", "True")
    world.wait_events(namespace, "m", "ContextTooSmall")

    (old,) = world.find("Pod", namespace)
    world.patch("LLMDeployment", namespace, "m", {"spec": {"engine": {"kvCache": {"memory": "187Mi"}}}})
    world.wait_condition(namespace, "m", "Stalled", "False")
    serve(world, namespace, 8192, revision=2)
    world.delete("Pod", namespace, old["metadata"]["name"])
    world.wait_condition(namespace, "m", "Ready", "True")
    world.wait_condition(namespace, "m", "ContextReduced", "False", "AsWanted")
