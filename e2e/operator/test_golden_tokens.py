"""The canary's tokens of the first ready replica are kept, and who disagrees with them is named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from e2e.operator import pods
from e2e.operator.statusz import statusz_server
from e2e.operator.world import World
from e2e.waiting import eventually

pytestmark = [pytest.mark.api, pytest.mark.usefixtures("operator")]

NAME = "m-golden-tokens"
FINGERPRINT = "a" * 64


@contextmanager
def replica(world: World, namespace: str, tokens: list[int]) -> Iterator[str]:
    """A pod that loads, is asked by the operator, and is ready while the block runs."""
    answer = {"phase": "serving", "canary": {"fingerprint": FINGERPRINT, "tokens": tokens}}
    with statusz_server(answer) as pod:
        made = world.make_pod(namespace, "m", pods.loading(ip=pod.ip))
        name = str(made["metadata"]["name"])
        eventually("the operator has asked it", lambda: pod.asked)
        world.patch("Pod", namespace, name, {"status": {**pods.ready(), "podIP": pod.ip}}, status=True)
        yield name


def kept(world: World, namespace: str) -> list[dict[str, Any]] | None:
    config_map = world.get("ConfigMap", namespace, NAME)
    return None if config_map is None else json.loads(config_map["data"]["golden.json"])


def entry(tokens: list[int], pod: str) -> list[dict[str, Any]]:
    return [{"fingerprint": FINGERPRINT, "tokens": tokens, "pod": pod}]


def test_the_tokens_of_the_first_ready_replica_are_kept_for_pods_to_mount_and_dissent_is_named(
    world: World, namespace: str
) -> None:
    world.deploy(namespace, "m", replicas=2)
    deployment = eventually("the Deployment", lambda: world.get("Deployment", namespace, "m"))
    volumes = deployment["spec"]["template"]["spec"]["volumes"]
    assert {"name": NAME, "optional": True, "defaultMode": 420} in [v.get("configMap") for v in volumes]
    with replica(world, namespace, [1, 2, 3]) as first:
        eventually("its tokens are kept", lambda: kept(world, namespace) == entry([1, 2, 3], first))
        config_map = world.get("ConfigMap", namespace, NAME)
        assert config_map is not None
        assert config_map["metadata"]["ownerReferences"][0]["name"] == "m"
        with replica(world, namespace, [1, 2, 4]) as second:
            degraded = world.wait_condition(namespace, "m", "Degraded", "True", "CanaryMismatch")
            for word in (first, second, NAME):
                assert word in degraded["message"]
            world.wait_events(namespace, "m", "CanaryMismatch")
            unchanged = world.get("ConfigMap", namespace, NAME)
            assert unchanged is not None
            version = unchanged["metadata"]["resourceVersion"]
            assert version == config_map["metadata"]["resourceVersion"], "nothing changed, and it was written"

            # The remedy of the message, where the first one is the damaged one.
            world.delete("Pod", namespace, first)
            eventually("it is gone", lambda: world.get("Pod", namespace, first) is None)
            world.delete("ConfigMap", namespace, NAME)
            eventually("the next one's are kept", lambda: kept(world, namespace) == entry([1, 2, 4], second))
            world.wait_condition(namespace, "m", "Degraded", "False")
