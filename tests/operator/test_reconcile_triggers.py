"""When an LLMDeployment is reconciled: related events once, and never behind a re-list."""

from __future__ import annotations

import asyncio

from quire_operator import names
from tests.operator.fake_api import FakeApi
from tests.operator.test_controller import LLM, controlling, model, until


async def test_events_of_a_pod_in_quick_succession_are_reconciled_together() -> None:
    api = FakeApi()
    async with controlling(api) as (controller, _, metrics):
        work = asyncio.create_task(controller.run())
        controller.on_event("ADDED", api.put(LLM, model()))
        done = "quire_operator_reconcile_total"
        await until(lambda: metrics.registry.get_sample_value(done, {"result": "changed"}))
        for number in range(20):
            pod = {"kind": "Pod", "spec": {"containers": []}, "metadata": {"name": "p", "namespace": "ns"}}
            pod["metadata"] |= {"labels": {names.LABEL_NAME: "m"}, "annotations": {"n": str(number)}}
            controller.on_event("MODIFIED", api.put("/api/v1/namespaces/ns/pods/p", pod))
            await asyncio.sleep(0.001)
        await until(lambda: metrics.registry.get_sample_value(done, {"result": "unchanged"}))
        work.cancel()

    assert metrics.registry.get_sample_value(done, {"result": "unchanged"}) <= 3


async def test_a_resync_yields_to_the_event_loop_between_reconciles() -> None:
    api, size, turns = FakeApi(), 30, 0
    for number in range(size):
        body = model()
        body["metadata"] |= {"name": f"m{number}", "uid": f"u{number}"}
        api.put(f"{LLM}{number}", body)

    async def take_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async with controlling(api) as (controller, _, metrics):

        def looks(result: str) -> float:
            total = "quire_operator_reconcile_total"
            return metrics.registry.get_sample_value(total, {"result": result}) or 0

        await controller.prime()
        work = asyncio.create_task(controller.run())
        await until(lambda: looks("changed") == size)
        await controller._resync()
        before, other = looks("unchanged"), asyncio.create_task(take_turns())
        await until(lambda: looks("unchanged") >= before + size)
        other.cancel()
        work.cancel()

    assert turns >= size - 1, "one at least between any two looks"


async def test_an_edit_of_a_deployment_is_queued_at_once_and_a_status_update_after_a_delay() -> None:
    api = FakeApi()
    async with controlling(api) as (controller, _, metrics):
        deployment = {"kind": "Deployment", "metadata": {"name": "m", "namespace": "ns", "generation": 2}}
        deployment["metadata"] |= {"labels": {names.LABEL_NAME: "m"}}
        path = "/apis/apps/v1/namespaces/ns/deployments/m"
        waiting = []
        for seen in (2, 1):
            controller.on_event(
                "MODIFIED", api.put(path, {**deployment, "status": {"observedGeneration": seen}})
            )
            waiting.append(metrics.registry.get_sample_value("quire_operator_queue_depth"))

    assert waiting == [0, 1]
