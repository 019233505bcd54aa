"""A rollout has failed when its own pods fail, not when those that it replaces do."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from e2e.operator import pods as kubelet
from quire_operator import spec, status
from quire_operator.observed import Observed, Ref
from tests.operator.status.objects import Body, deployment, model_body, pod, replica_set

CORRUPT = kubelet.terminated(65, "ModelCorrupt", restarts=1)


def why(*pods: Body, of: Body | None = None, made: str = "engine:1") -> str:
    containers = {"spec": {"containers": [{"name": "server", "image": made}]}}
    live = of or deployment(replicas=2, updated=1, ready=1)
    newest = {**replica_set("rs2", 2), "spec": {"template": {**containers, "metadata": {"labels": {}}}}}
    live["spec"]["template"]["metadata"] = {"labels": {}}
    observed = Observed(
        body=model_body(),
        children={Ref("Deployment", "m"): live},
        replica_sets=(replica_set("rs1", 1), newest),
        pods=pods,
    )
    return status.rollout_failure(spec.parse(model_body()), observed, now=datetime.now(UTC))


def late(**fields: Any) -> Body:
    return deployment(replicas=2, updated=1, ready=1, Progressing="ProgressDeadlineExceeded", **fields)


def test_a_rollout_fails_when_a_new_pod_terminates_twice_with_a_permanent_failure() -> None:
    assert why(pod(CORRUPT)).startswith("ModelCorrupt")
    assert why(pod(kubelet.terminated(65, "ModelCorrupt"))) == "", "once may be chance"
    assert why(pod(kubelet.terminated(70, "EngineCrashed", restarts=9))) == "", "a restart may help"


def test_a_rollout_past_its_deadline_fails_with_the_reason_of_its_pods() -> None:
    waiting = kubelet.waiting("ErrImagePull", "no such tag")
    assert why(pod(waiting), of=late()).startswith("ProgressDeadlineExceeded: ImagePullFailed")
    assert why(of=late()) == "ProgressDeadlineExceeded"


def test_failing_pods_of_an_earlier_template_do_not_fail_the_rollout() -> None:
    assert why(pod(CORRUPT, of="rs1")) == ""
    assert why(pod(CORRUPT), made="engine:0") == "", "the new pods are not made yet"
    assert why(pod(CORRUPT), of=late(seen=False)) == "", "the report is of the old template"
