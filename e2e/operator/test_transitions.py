"""After any sequence of specs, the children are the same as those of the last spec applied to a new
LLMDeployment.

Specs are drawn from the CRD's schema and applied one after another, with or without waiting for the operator.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from e2e.api import specs
from e2e.api.client import RefusedError
from e2e.chaos.children import children, differences
from e2e.operator.world import PATHS, World
from e2e.waiting import eventually

pytestmark = [pytest.mark.api, pytest.mark.timeout(300), pytest.mark.usefixtures("operator")]

Body = dict[str, Any]
ROUNDS = 12
_NUMBERS = itertools.count()

ways = st.lists(
    st.tuples(specs.random_bodies().map(lambda body: body["spec"]), st.booleans()), min_size=2, max_size=5
)


@pytest.mark.deep
@settings(
    max_examples=ROUNDS,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(way=ways)
def test_any_sequence_of_specs_ends_in_the_children_of_a_new_llmdeployment(
    world: World, namespace: str, way: list[tuple[Body, bool]]
) -> None:
    number = next(_NUMBERS)
    travelled, fresh = (
        world.namespace(f"{namespace[:30]}{namespace[-9:]}-{where}-{number}") for where in ("way", "new")
    )
    first, waits = way[0]
    create(world, travelled, first)
    for spec, settles in way[1:]:
        if waits:
            answered(world, travelled)
        replace(world, travelled, spec)
        waits = settles
    last = world.read("LLMDeployment", travelled, "m")["spec"]
    create(world, fresh, last)
    answered(world, fresh)
    answered(world, travelled)

    def is_alike() -> bool:
        for each in (travelled, fresh):
            download(world, each)
            roll_out(world, each)
        return comparable(world, travelled, last) == comparable(world, fresh, last)

    try:
        eventually("the same children", is_alike)
    except AssertionError:
        differing = differences(comparable(world, travelled, last), comparable(world, fresh, last))
        assert differing == [], world.condition(fresh, "m", "Ready")["message"]
        raise


def create(world: World, namespace: str, spec: Body) -> None:
    offer_claim(world, namespace, spec)
    body = {**specs.MINIMAL, "metadata": {"name": "m", "namespace": namespace}, "spec": spec}
    world.create("LLMDeployment", namespace, body)


def offer_claim(world: World, namespace: str, spec: Body) -> None:
    """The claim that the spec names, with its owner's consent: without it the spec is refused, and what ran
    before is kept.
    """
    name = spec.get("cache", {}).get("existingClaim")
    if name and world.get("PersistentVolumeClaim", namespace, name) is None:
        claim = {
            "metadata": {"name": name, "labels": {"serving.quire.dev/referable": "true"}},
            "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
        }
        world.create("PersistentVolumeClaim", namespace, claim)


def replace(world: World, namespace: str, spec: Body) -> None:
    """As `kubectl replace` does it; a transition that the API refuses is skipped."""
    offer_claim(world, namespace, spec)
    path = f"{PATHS['LLMDeployment'].format(namespace)}/m"
    while True:
        live = world.client.request("GET", path)
        try:
            world.client.request("PUT", path, {**live, "spec": spec})
        except RefusedError as error:
            if "has been modified" in str(error):
                continue
            assert "immutable" in str(error), error
        return


def download(world: World, namespace: str) -> None:
    """The status of completed downloads of a shared model: until then there is no Deployment for it."""
    for job in world.find("Job", namespace):
        if not job.get("status", {}).get("conditions"):
            world.end_job(namespace, job)


def roll_out(world: World, namespace: str) -> None:
    """The status of completed rollouts: strategy Auto replaces in place until then."""
    for name in ("m", "m-prefill"):
        live = world.get("Deployment", namespace, name)
        if live is None or live.get("status", {}).get("observedGeneration") == live["metadata"]["generation"]:
            continue
        world.roll_out(namespace, name, ready=live["spec"]["replicas"])


def answered(world: World, namespace: str) -> None:
    def is_answered() -> bool:
        model = world.read("LLMDeployment", namespace, "m")
        return bool(model.get("status", {}).get("observedGeneration") == model["metadata"]["generation"])

    eventually(f"{namespace} is answered to", is_answered)


def comparable(world: World, namespace: str, spec: Body) -> dict[str, Body]:
    found = children(world, namespace, "m", history=False)
    roles = {"m": spec, "m-prefill": spec.get("disaggregation", {}).get("prefill", {})}
    for name, role in roles.items():
        # Then the number of pods is not the operator's, and stays what it was.
        if "autoscaling" in role and f"Deployment {name}" in found:
            found[f"Deployment {name}"]["spec"].pop("replicas", None)
    return found
