"""Pods wait for a shared model, a failed download restarts where that helps, and an unused claim is
deleted.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from e2e.api import specs
from quire_operator import plan, resources, spec
from quire_operator.observed import Observed, Ref, ref
from quire_operator.plan import model_cache
from quire_operator.settings import Settings
from tests.operator.plan.planning import plan_of

Body = dict[str, Any]

NOW = datetime.now(UTC)
SETTINGS = Settings(engine_image="engine:1", credential_hosts=("*.example.com",))
BODY = specs.merged(
    specs.DOWNLOADED[4], {"metadata": {"uid": "u"}, "spec": {"cache": {"retainPolicy": "Delete"}}}
)


def at(seconds: float) -> str:
    return (NOW + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def rendered(**patch: Any) -> tuple[Body, ...]:
    return resources.build(spec.parse(specs.merged(BODY, {"spec": patch})), SETTINGS)


def stored(children: tuple[Body, ...], without: tuple[str, ...] = (), **job: Any) -> dict[Ref, Body]:
    """These children as the API server has them; `job`: its status."""
    live = {}
    for child in map(plan.with_applied_hash, children):
        if child["kind"] not in without:
            uid = f"uid-{child['kind']}-{child['metadata']['name']}"
            live[ref(child)] = {**child, "metadata": {**child["metadata"], "uid": uid}}
            if child["kind"] == "Job":
                live[ref(child)]["status"] = job
    return live


def done(seconds: float = -60) -> Body:
    complete = {"type": "Complete", "status": "True", "lastTransitionTime": at(seconds)}
    return {"conditions": [complete], "completionTime": at(seconds)}


def failed(seconds: float) -> Body:
    return {"conditions": [{"type": "Failed", "status": "True", "lastTransitionTime": at(seconds)}]}


def planned(desired: tuple[Body, ...], live: dict[Ref, Body], **observed: Any) -> plan.Plan:
    return plan_of(desired, Observed(body=BODY, children=live, **observed))


def renewed(
    live: dict[Ref, Body], desired: tuple[Body, ...], corrupt: dict[str, str], **more: Any
) -> list[str]:
    observed = Observed(body=BODY, children=live, **more)
    hashed = [plan.with_applied_hash(one) for one in desired]
    restarts = model_cache.restarted_downloads(hashed, observed, corrupt, NOW)
    return [str(target) for target, _, _ in restarts]


def kinds(found: plan.Plan) -> set[str]:
    return {str(manifest["kind"]) for manifest in found.apply}


def test_the_deployment_and_its_autoscaler_are_applied_only_after_the_download() -> None:
    scaled = rendered(autoscaling={"maxReplicas": 4})
    waits = {"Deployment", "HorizontalPodAutoscaler"}
    first = planned(scaled, {})
    assert {"PersistentVolumeClaim", "Job", "Service"} <= kinds(first)
    assert not kinds(first) & waits
    assert not kinds(planned(scaled, stored(scaled, tuple(waits)))) & waits
    assert kinds(planned(scaled, stored(scaled, tuple(waits), **done()))) == waits


def test_the_old_model_serves_until_the_new_one_is_downloaded() -> None:
    old, new = rendered(), rendered(model={"source": {"huggingFace": {"revision": "v2"}}}, replicas=3)
    before = stored(old, **done())
    first = planned(new, before)
    assert kinds(first) >= {"PersistentVolumeClaim", "Job"}
    assert "Deployment" not in kinds(first)
    assert {target.kind for target, _ in first.delete} >= {"Job"}
    assert "PersistentVolumeClaim" not in {target.kind for target, _ in first.delete}
    ready = {
        **before,
        **{k: v for k, v in stored(new, **done()).items() if k.kind in ("Job", "PersistentVolumeClaim")},
    }
    assert kinds(planned(new, ready)) >= {"Deployment"}


def test_an_unfinished_job_for_the_served_model_delays_no_change_of_the_deployment() -> None:
    live = stored(rendered())
    assert kinds(planned(rendered(replicas=3), live)) == {"Deployment"}


def test_an_owned_claim_is_deleted_once_no_replica_set_or_pod_uses_it() -> None:
    old, new = rendered(), rendered(model={"source": {"huggingFace": {"revision": "v2"}}})
    (claim,) = [child for child in old if child["kind"] == "PersistentVolumeClaim"]
    live = {**stored(new, **done()), **{k: v for k, v in stored(old).items() if k == ref(claim)}}
    (deployment,) = [child for child in old if child["kind"] == "Deployment"]
    served = deployment["spec"]["template"]["spec"]
    replica_set = {"metadata": {"name": "rs", "uid": "rs"}, "spec": {"template": {"spec": served}}}

    def gone(**observed: Any) -> bool:
        return ref(claim) in {target for target, _ in planned(new, live, **observed).delete}

    old_set = {**replica_set, "spec": {**replica_set["spec"], "replicas": 0}}
    live_set = {**replica_set, "spec": {**replica_set["spec"], "replicas": 1}}
    pod = {"kind": "Pod", "metadata": {"name": "p", "uid": "p"}, "spec": served}
    assert gone() and gone(replica_sets=(old_set,))
    assert not gone(replica_sets=(live_set,)) and not gone(pods=(pod,))
    live[ref(claim)]["metadata"].pop("ownerReferences")
    assert not gone(), "retained"


def test_the_claim_and_the_job_of_the_revision_that_a_rollback_returns_to_are_kept() -> None:
    old, new = rendered(), rendered(model={"source": {"huggingFace": {"revision": "v2"}}})
    revision = resources.render_revision(spec.parse(BODY), BODY["spec"], old)
    downloaded = {
        k: v for k, v in stored(old, **done()).items() if k.kind in ("Job", "PersistentVolumeClaim")
    }
    live = {**stored(new, **done()), **downloaded}

    def deleted(may_return_to: resources.RenderedRevision | None) -> set[Ref]:
        found = plan_of(new, Observed(body=BODY, children=live), may_return_to=may_return_to)
        return {target for target, _ in found.delete}

    assert deleted(None) == set(downloaded)
    assert deleted(revision) == set()


@pytest.mark.parametrize(
    ("status", "corrupt", "again"),
    [
        (done(), {}, False),
        (done(-60), {"m-0": at(-30)}, True),
        (done(-60), {"m-0": at(-90)}, False),
        ({}, {"m-0": at(-30)}, False),
        ({}, {}, False),
        (failed(-model_cache.RETRY_SECONDS - 1), {}, True),
        (failed(-10), {}, False),
    ],
)
def test_a_failed_download_restarts_after_a_delay_and_a_complete_one_for_a_corrupt_file(
    status: Body, corrupt: dict[str, str], again: bool
) -> None:
    desired = rendered()
    assert bool(renewed(stored(desired, **status), desired, corrupt)) is again


def test_a_job_that_would_be_rendered_differently_is_replaced_unless_it_is_complete() -> None:
    other = rendered(cache={"download": {"timeoutSeconds": 99}})
    for status, again in (({}, True), (failed(-1), True), (done(), False)):
        live = stored(rendered(), **status)
        assert bool(renewed(live, other, {})) is again
        assert "Job" not in kinds(planned(other, live)), "a Job is immutable"


def test_a_pod_that_downloaded_a_corrupt_model_itself_is_deleted_after_a_delay() -> None:
    def pod(age: float, *, fetches: bool) -> Body:
        containers = {"initContainers": [{"name": "fetch"}]} if fetches else {}
        about = {"name": "m-0", "uid": "p", "creationTimestamp": at(-age)}
        return {"kind": "Pod", "metadata": about, "spec": containers}

    def deleted(one: Body, corrupt: dict[str, str]) -> list[str]:
        return renewed({}, (), corrupt, pods=(one,))

    found = {"m-0": at(-1)}
    assert deleted(pod(700, fetches=True), found) == ["Pod m-0"]
    assert deleted(pod(700, fetches=True), {}) == []
    assert deleted(pod(100, fetches=True), found) == []
    assert deleted(pod(700, fetches=False), found) == []
