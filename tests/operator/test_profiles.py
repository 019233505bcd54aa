"""An AcceleratorProfile is read when an LLMDeployment names it; a missing one is reported and restarts no
pod.
"""

from __future__ import annotations

from typing import Any

import pytest

from e2e.api import profiles
from quire_operator import names
from quire_operator.cluster import Cluster
from quire_operator.reconcile import Reconciler, ReconcileResult
from tests.operator.fake_api import FakeApi
from tests.operator.test_reconcile import KEY, LLM, Body, model, reconciling

PROFILE = "/apis/serving.quire.dev/v1alpha1/acceleratorprofiles/h100"
DEPLOYMENT = "/apis/apps/v1/namespaces/ns/deployments/m"


def named(**spec: Any) -> Body:
    return model(resources={"cpu": "1", "memory": "2Gi", "profileRef": {"name": "h100"}}, **spec)


async def reconciled(api: FakeApi, reconcile: Reconciler, cluster: Cluster, body: Body) -> ReconcileResult:
    """A changed spec as the API server stores it: under the next generation, with the status it had."""
    stored = api.objects.get(LLM, {})
    generation = stored.get("metadata", {}).get("generation", 0) + 1
    body = {**body, "metadata": {**body["metadata"], "generation": generation}}
    cluster.cache.put(api.put(LLM, {**body, "status": stored.get("status", {})}))
    return await reconcile(KEY)


def memory_of(api: FakeApi) -> Any:
    (container,) = api.objects[DEPLOYMENT]["spec"]["template"]["spec"]["containers"]
    return container["resources"]["limits"]


def ready_of(api: FakeApi) -> Body:
    (ready,) = [c for c in api.objects[LLM]["status"]["conditions"] if c["type"] == "Ready"]
    return dict(ready)


async def test_a_missing_profile_is_reported_and_used_once_it_exists() -> None:
    api = FakeApi()
    async with reconciling(api) as (reconcile, cluster):
        result = await reconciled(api, reconcile, cluster, named())
        missing = ready_of(api)
        assert DEPLOYMENT not in api.objects
        api.put(PROFILE, profiles.FULL)
        await reconcile(KEY)

    assert (missing["reason"], result.phase) == ("ProfileNotFound", "Pending")
    assert "there is no h100" in missing["message"]
    assert result.requeue_after is not None and result.requeue_after <= 10, "it is looked for by itself"
    reported = [r.body["reason"] for r in api.requests if r.path.endswith("/events")]
    assert reported == ["ProfileNotFound"]
    assert "example.com/h100" in memory_of(api)


@pytest.mark.parametrize("change", ["changed", "deleted", "unreadable", "forbidden"])
async def test_a_change_of_the_profile_leaves_the_pod_template_until_the_spec_changes(change: str) -> None:
    api = FakeApi()
    api.put(PROFILE, profiles.FULL)
    async with reconciling(api) as (reconcile, cluster):
        await reconciled(api, reconcile, cluster, named())
        before = api.objects[DEPLOYMENT]["spec"]["template"]
        match change:
            case "changed":
                api.put(PROFILE, profiles.profile(resourceName="example.com/other"))
            case "deleted":
                del api.objects[PROFILE]
            case "unreadable":
                api.put(PROFILE, profiles.profile(memory="a lot"))
            case "forbidden":
                api.answers["GET", PROFILE] = (403, "cannot get resource acceleratorprofiles")
        await reconciled(api, reconcile, cluster, named(replicas=3))

        assert api.objects[DEPLOYMENT]["spec"]["template"] == before
        assert api.objects[DEPLOYMENT]["spec"]["replicas"] == 3, "its number still follows the spec"
        assert ("availableRenderRevision" in api.objects[LLM]["status"]) == (change == "changed")

        await reconciled(api, reconcile, cluster, named(engine={"maxModelLen": 4096}))

    if change == "changed":
        assert "example.com/other" in memory_of(api), "the next change of the spec takes it up"
    else:
        assert api.objects[DEPLOYMENT]["spec"]["template"] == before
        assert ready_of(api)["reason"] == "ProfileNotFound"


async def test_without_a_profile_ref_no_profile_is_requested() -> None:
    api = FakeApi()
    async with reconciling(api) as (reconcile, cluster):
        await reconciled(api, reconcile, cluster, model())

    assert not [request for request in api.requests if names.PROFILE_PLURAL in request.path]
