"""What the pods cost per hour, by the price in the profile, in the operator's metrics."""

from __future__ import annotations

import asyncio

from e2e.api import profiles
from e2e.operator import pods as kubelet
from quire_operator import status
from quire_operator.observed import Observed, Ref
from quire_operator.spec import Profile
from tests.operator.fake_api import FakeApi
from tests.operator.status.objects import deployment, model_body, pod, replica_set
from tests.operator.test_controller import LLM, controlling, model, until

PRICED = Profile(memory="80G", cost_per_hour="2.50")
METRIC = "quire_llmdeployment_cost_per_hour", {"namespace": "ns", "llmdeployment": "m"}


def cost(profile: Profile | None, observed: Observed, prefill: Profile | None = None) -> float | None:
    requested = status.RequestedAccelerator(profile=profile, prefill_profile=prefill)
    return status.cost_per_hour(requested, observed)


def test_every_pod_that_has_a_node_costs_the_price_and_ended_ones_nothing() -> None:
    reported = (
        kubelet.ready(),
        kubelet.loading(),
        kubelet.unschedulable("0/1 nodes are available: 1 Insufficient nvidia.com/gpu."),
        kubelet.put_out("Evicted", "The node was low on resource: memory."),
    )
    pods = tuple(pod(each, name=f"m-{index}") for index, each in enumerate(reported))
    observed = Observed(body=model_body(), pods=pods)

    assert cost(PRICED, observed) == 5.0
    assert cost(PRICED, Observed(body=model_body())) == 0.0
    assert cost(Profile(memory="80G"), observed) is None
    assert cost(None, observed) is None


def test_the_pods_of_each_role_cost_the_price_of_their_own_profile() -> None:
    cheap = Profile(memory="24G", cost_per_hour="0.5")
    decode, prefill = pod(kubelet.ready(), name="decode", of="d1"), pod(kubelet.ready(), name="p", of="p1")
    made = deployment(ready=1)
    sets = [replica_set("d1", 1), replica_set("p1", 1)]
    sets[1]["metadata"]["ownerReferences"] = [{"controller": True, "uid": "d2"}]
    observed = Observed(
        body=model_body(disaggregation={"prefill": {}}),
        children={
            Ref("Deployment", "m"): made,
            Ref("Deployment", "m-prefill"): {
                **made,
                "metadata": {**made["metadata"], "name": "m-prefill", "uid": "d2"},
            },
        },
        replica_sets=tuple(sets),
        pods=(decode, prefill, prefill),
    )

    assert cost(PRICED, observed, cheap) == 2.5 + 2 * 0.5
    assert cost(None, observed, cheap) == 2 * 0.5
    assert cost(PRICED, observed, Profile(memory="24G")) == 2.5


def test_a_pod_costs_the_price_of_each_accelerator_that_it_has() -> None:
    body = pod(kubelet.ready(), name="m-0")
    body["spec"]["containers"] = [{"resources": {"limits": {"nvidia.com/gpu": "4", "memory": "8Gi"}}}]
    observed = Observed(body=model_body(), pods=(body, pod(kubelet.ready(), name="m-1")))
    assert cost(PRICED, observed) == 5 * 2.5


def test_the_workers_of_a_group_cost_as_much_as_its_leader() -> None:
    with_eight = pod(kubelet.ready(), name="m-0-1")
    with_eight["spec"]["containers"] = [{"resources": {"limits": {"nvidia.com/gpu": "8"}}}]
    waiting = pod(kubelet.unschedulable("0/1 nodes are available."), name="m-0-2")
    workers = (with_eight, waiting)
    observed = Observed(body=model_body(), pods=(pod(kubelet.ready(), name="m-0"),), workers=workers)
    assert cost(PRICED, observed) == (1 + 8) * 2.5


async def test_the_cost_is_a_metric_as_long_as_the_llmdeployment_is_there() -> None:
    api = FakeApi()
    api.put("/apis/serving.quire.dev/v1alpha1/acceleratorprofiles/h100", profiles.FULL)
    body = model(resources={"cpu": "1", "memory": "2Gi", "profileRef": {"name": "h100"}})
    async with controlling(api) as (controller, _, metrics):
        work = asyncio.create_task(controller.run())
        stored = api.put(LLM, body)
        controller.on_event("ADDED", stored)
        await until(lambda: metrics.registry.get_sample_value(*METRIC) == 0.0)
        controller.on_event("DELETED", stored)
        await until(lambda: metrics.registry.get_sample_value(*METRIC) is None)
        work.cancel()
