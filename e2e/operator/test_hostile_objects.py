"""Objects that any tenant may create and that the API server stores: whatever they contain, the operator goes
on for everyone else.

The CRD of this API server has an open schema in one place, as LLMDeployments had: Helm does not upgrade CRDs,
and the operator must not depend on it.
"""

from __future__ import annotations

import copy
import json
import os
import random
import statistics
import string
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from e2e.api.specs import CRD, Body
from e2e.cluster.apiserver import ApiServer
from e2e.operator import rights
from e2e.operator.audited import audited
from e2e.operator.process import OperatorProcess
from e2e.operator.world import PATHS, World
from e2e.waiting import eventually

pytestmark = [pytest.mark.api, pytest.mark.timeout(600)]

OBJECTS = int(os.environ.get("HOSTILE_OBJECTS", "100"))
NEIGHBOURS = 25  # in turns, because the changes of one are paced
KEPT = 40  # that are there at once
LARGEST_EVERY = 40
MOST_BYTES = 1_000_000


def open_crd() -> Body:
    """The CRD with an open schema of the affinity."""
    crd: Body = copy.deepcopy(CRD)
    (version,) = crd["spec"]["versions"]
    scheduling = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["scheduling"]
    scheduling["properties"]["affinity"] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return crd


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[ApiServer, World]]:
    with audited(open_crd()) as both:
        yield both


@pytest.fixture(scope="module")
def world(both: tuple[ApiServer, World]) -> World:
    return both[1]


@pytest.fixture(scope="module")
def kubeconfig(both: tuple[ApiServer, World], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("operator") / "kubeconfig"
    return rights.token_kubeconfig(*both, "quire-operator", path)


def nested(depth: int, how: str) -> str:
    """JSON nested that deep: in arrays, in objects, or in both in turns."""
    opened = {"arrays": ["["], "objects": ['{"a":'], "both": ['{"a":', "["]}[how]
    closed = {"arrays": ["]"], "objects": ["}"], "both": ["}", "]"]}[how]
    levels = [level % len(opened) for level in range(depth)]
    return "".join(opened[i] for i in levels) + "0" + "".join(closed[i] for i in reversed(levels))


def hostile(name: str, index: int, random: random.Random) -> tuple[str, bytes]:
    """The kind and the text of an object that the API server takes; it needs seconds for the largest."""
    seldom = {0: wide, LARGEST_EVERY // 2: large}
    make = seldom.get(index % LARGEST_EVERY) or random.choice((deep, deep, deep_revision, strange, numbers))
    kind, document, replaced = make(name, random)
    text = json.dumps(document)
    for placeholder, raw in replaced.items():
        text = text.replace(json.dumps(placeholder), raw)
    return kind, text.encode()


Made = tuple[str, Body, dict[str, str]]


def llm_deployment(name: str, **spec: object) -> Body:
    return {
        "apiVersion": "serving.quire.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": name},
        "spec": {
            "model": {"source": {"pvc": {"claimName": "models"}}},
            "resources": {"cpu": "1", "memory": "2Gi"},
            **spec,
        },
    }


def deep(name: str, random: random.Random) -> Made:
    depth = random.choice((90, 110, 800, 900, 950, 980, 1000, 1200, 3000, 9000))
    raw = nested(depth, random.choice(("arrays", "objects", "both")))
    return "LLMDeployment", llm_deployment(name, scheduling={"affinity": {"x": "RAW"}}), {"RAW": raw}


def deep_revision(name: str, random: random.Random) -> Made:
    labels = {"serving.quire.dev/name": random.choice(("neighbour", name))}
    document = {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": {"name": name, "labels": labels},
        "revision": 1,
        "data": {"x": "RAW"},
    }
    return "ControllerRevision", document, {"RAW": nested(random.choice((950, 3000, 9000)), "objects")}


def wide(name: str, random: random.Random) -> Made:
    document = llm_deployment(name)
    document["metadata"]["labels"] = {f"k{i}": "" for i in range(random.choice((20_000, 60_000)))}
    return "LLMDeployment", document, {}


def large(name: str, random: random.Random) -> Made:
    """All the room that the schema leaves, and labels up to a megabyte."""
    document = llm_deployment(
        name,
        engine={
            "extraArgs": ["x" * 1024] * 64,
            "env": [{"name": f"E{i}", "value": "y" * 4096} for i in range(64)],
        },
    )
    document["metadata"]["annotations"] = {"a": "z" * 250_000}
    rest = MOST_BYTES - len(json.dumps(document))
    document["metadata"]["labels"] = {f"l{i:05}": "v" * 63 for i in range(rest // 80)}
    return "LLMDeployment", document, {}


def strange(name: str, random: random.Random) -> Made:
    """Text in every free place: invisible, combining, astral, right to left, and what looks like JSON."""
    texts = (
        "\ufeff",
        "\u202e\u2066",
        "e" + "\u0301" * 1000,
        "\U0001f469\u200d\U0001f52c" * 100,
        "\\ud800",
        '{"[',
        "\x7f\x85\u2028",
    )
    text = "".join(random.choice(texts) for _ in range(random.randrange(1, 8)))
    document = llm_deployment(
        name, engine={"extraArgs": [text[:1024]], "env": [{"name": "A", "value": text[:4096]}]}
    )
    document["metadata"]["annotations"] = {"a": text}
    return "LLMDeployment", document, {}


def numbers(name: str, random: random.Random) -> Made:
    quantity = random.choice(("9" * 12 + "m", "64Ti", 2**40, "0.001Ti"))
    document = llm_deployment(
        name, engine={"kvCache": {"blockSize": 256}}, scheduling={"affinity": {"x": "RAW"}}
    )
    document["spec"]["resources"] = {"cpu": 1024, "memory": quantity}
    raw = random.choice(("1e308", "-1e-320", "9" * 30, "1" + "0" * 300, "-0", "9223372036854775807"))
    return "LLMDeployment", document, {"RAW": raw}


@pytest.mark.deep
@pytest.mark.chaos(
    16, fault="objects that Python cannot decode, or of a megabyte", proof="the API server takes them"
)
def test_no_object_of_a_tenant_delays_a_neighbour_or_stops_the_operator(
    world: World, kubeconfig: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    random_ = random.Random(20261123)
    world.namespace("hostile")
    world.namespace("neighbour")
    operator = OperatorProcess(
        "hostile", kubeconfig, tmp_path, QUIRE_RESYNC_SECONDS="600"
    ).start()  # which would hide a lost watch
    try:
        operator.wait_leading(world)
        for number in range(NEIGHBOURS):
            world.deploy("neighbour", f"m{number}", replicas=1)
        eventually("their children", lambda: world.has_children("neighbour", f"m{NEIGHBOURS - 1}"))
        alone = [reconciled(world, operator, f"m{i}", replicas=2) for i in range(NEIGHBOURS)]
        there: list[tuple[str, str]] = []
        seconds: list[float] = []
        for index in range(OBJECTS):
            name = f"h{index}-" + "".join(random_.choices(string.ascii_lowercase, k=4))
            kind, text = hostile(name, index, random_)
            status = world.client.send("POST", PATHS[kind].format("hostile"), text)
            assert status == 201, f"the API server does not take {name}: {status}"
            there.append((kind, name))
            if len(there) > KEPT:
                kind, name = there.pop(0)
                assert world.client.send("DELETE", f"{PATHS[kind].format('hostile')}/{name}") == 200
            seconds.append(reconciled(world, operator, f"m{index % NEIGHBOURS}", replicas=3 + index))
        assert operator.code is None, operator.tail()
        usual, before = statistics.median(seconds), statistics.median(alone)
        record_property(
            "measured",
            f"{OBJECTS}: a neighbour's change in {usual:.2f} s ({before:.2f} s before them), "
            f"at most {max(seconds):.2f} s",
        )
        assert usual < 5 * before

        metrics = operator.metrics()
        unreadable = {name: n for name, n in metrics.items() if "unreadable_objects_total" in name}
        assert unreadable['quire_operator_unreadable_objects_total{kind="LLMDeployment"}'] > 0
        assert "LLMDeployment hostile/h" in operator.log.read_text(errors="replace"), "it is named"
    finally:
        operator.stop()

    again = OperatorProcess("hostile-2", kubeconfig, tmp_path).start()  # its first list has them all
    try:
        again.wait_leading(world)
        reconciled(world, again, "m0", replicas=1)
        assert again.code is None, again.tail()
    finally:
        again.stop()


def reconciled(world: World, operator: OperatorProcess, name: str, replicas: int) -> float:
    """Seconds until a change of a neighbour reaches its Deployment."""
    began = time.monotonic()
    world.patch("LLMDeployment", "neighbour", name, {"spec": {"replicas": replicas}})

    def applied() -> bool:
        assert operator.code is None, operator.tail()
        return bool(world.read("Deployment", "neighbour", name)["spec"]["replicas"] == replicas)

    eventually("the neighbour is reconciled", applied, poll=0.02)
    return time.monotonic() - began
