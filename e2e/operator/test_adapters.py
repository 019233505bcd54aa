"""Adapters come and go in an LLMDeployment that serves: the list is written, and its pods are left alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from e2e.operator import pods
from e2e.operator.statusz import statusz_server
from e2e.operator.world import World
from e2e.waiting import eventually
from quire_operator import names

pytestmark = [pytest.mark.api, pytest.mark.usefixtures("operator")]


def adapter(name: str) -> dict[str, Any]:
    return {"name": name, "source": {"huggingFace": {"repo": f"example/{name}"}}}


def serving(*said: dict[str, Any]) -> dict[str, Any]:
    return {"phase": "serving", "adapters": list(said)}


def listed(world: World, namespace: str) -> list[str]:
    data = world.read("ConfigMap", namespace, names.adapters("m"))["data"]
    return [entry["name"] for entry in json.loads(data[names.ADAPTER_LIST_FILE])["adapters"]]


def states(world: World, namespace: str) -> dict[str, str]:
    return {one["name"]: one["state"] for one in world.status(namespace, "m").get("adapters", [])}


def test_adapters_come_and_go_without_another_pod_and_a_broken_one_costs_no_readiness(
    world: World, namespace: str
) -> None:
    world.deploy(namespace, "m", engine={"maxAdapters": 2})
    with statusz_server(serving()) as server:
        made = world.make_pod(namespace, "m", pods.loading(ip=server.ip))["metadata"]["name"]
        world.patch("Pod", namespace, made, {"status": pods.ready()}, status=True)
        world.roll_out(namespace, "m", ready=1)
        world.wait_condition(namespace, "m", "Ready", "True")
        assert listed(world, namespace) == []
        before = world.read("Deployment", namespace, "m")

        world.patch("LLMDeployment", namespace, "m", {"spec": {"adapters": [adapter("a"), adapter("b")]}})
        eventually("the list", lambda: listed(world, namespace) == ["a", "b"])
        world.wait_condition(namespace, "m", "AdaptersReady", "False", "AdaptersPending")
        server.answer = serving(
            {"name": "a", "state": "Fetching", "reason": "", "bytes": 47, "total_bytes": 100},
            {"name": "b", "state": "Failed", "reason": "there is no such repository"},
        )
        failed = world.wait_condition(namespace, "m", "AdaptersReady", "False", "AdapterFailed")
        assert f"b: pod {made}: there is no such repository" in failed["message"]
        world.wait_event(namespace, "m", "AdapterFailed")
        assert world.status(namespace, "m")["adapters"][0]["progress"] == "45%"
        assert world.condition(namespace, "m", "Ready")["status"] == "True"

        world.patch("LLMDeployment", namespace, "m", {"spec": {"adapters": [adapter("a")]}})
        eventually("the shorter list", lambda: listed(world, namespace) == ["a"])
        server.answer = serving({"name": "a", "state": "Ready", "reason": "", "revision": "9216db57"})
        world.wait_condition(namespace, "m", "AdaptersReady", "True", "AllAdaptersReady")
        assert states(world, namespace) == {"a": "Ready"}

        world.patch("LLMDeployment", namespace, "m", {"spec": {"adapters": None}})
        eventually("the empty list", lambda: listed(world, namespace) == [])
        eventually("a status without adapters", lambda: states(world, namespace) == {})
        after = world.read("Deployment", namespace, "m")
        assert after["spec"]["template"] == before["spec"]["template"], "no pod is replaced"
