"""Groups of pods as dicts, as LeaderWorkerSet makes them, and the status that is computed from them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from e2e.operator import pods as kubelet
from quire_operator import names, spec, status
from quire_operator.observed import Observed, Ref, find_workload
from quire_operator.reports import Sample
from tests.operator.status.objects import Body, model_body

HASH = "aaaaaaaaaa"


def at(seconds: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def a_set(groups: int = 1, revision: str = HASH) -> Body:
    template = {
        "metadata": {"annotations": {names.ANNOTATION_TEMPLATE_HASH: revision}},
        "spec": {"containers": [{"name": "server", "image": "engine:1"}]},
    }
    return {
        "kind": names.GROUP_KIND,
        "metadata": {"name": "m", "uid": "g1", "generation": 1},
        "spec": {"replicas": groups, "leaderWorkerTemplate": {"size": 2, "leaderTemplate": template}},
    }


def member(reported: Body, group: int = 0, worker: int = 0, **about: Any) -> Body:
    """A pod of a group as LeaderWorkerSet makes it; worker 0 is the leader."""
    leader = f"m-{group}"
    name = f"{leader}-{worker}" if worker else leader
    owner = {
        "controller": True,
        "kind": "StatefulSet",
        "name": leader if worker else "m",
        "uid": f"sts-{name}",
    }
    placed = "False" not in [
        c["status"] for c in reported.get("conditions", ()) if c["type"] == "PodScheduled"
    ]
    return {
        "kind": "Pod",
        "metadata": {
            "name": name,
            "uid": about.get("uid", f"uid-{name}"),
            "creationTimestamp": at(-about.get("age", 60)),
            "labels": {names.LABEL_GROUP_INDEX: str(group)},
            "annotations": {names.ANNOTATION_TEMPLATE_HASH: about.get("revision", HASH)},
            "ownerReferences": [owner],
        },
        "spec": {"nodeName": "node-1" if placed else "", "containers": [{"name": "server"}]},
        "status": reported,
    }


def compute(
    *pods: Body,
    groups: int = 1,
    old: Body | None = None,
    now: datetime | None = None,
    samples: Mapping[str, Sample] | None = None,
    parallelism: Body | None = None,
    **fields: Any,
) -> Body:
    body = {
        **model_body(
            replicas=groups,
            parallelism={"tensor": 2, "nodes": 2, **(parallelism or {})},
            resources={"cpu": "1", "memory": "2Gi"},
            **fields,
        ),
        "status": old or {},
    }
    live = a_set(groups)
    found = find_workload([live], pods)
    observed = Observed(
        body=body,
        children={Ref(names.GROUP_KIND, "m"): live},
        pods=found.pods,
        workers=found.workers,
        samples=samples or {},
    )
    assert len(found.pods) + len(found.workers) == len(pods), "every pod is one of a group"
    return status.compute_status(spec.parse(body), observed, now=now or datetime.now(UTC))


def recreated(times: int, *, apart: float = 20.0, reported: Body | None = None) -> Body:
    """The status after a group was recreated so often."""
    computed: Body = {}
    now = datetime.now(UTC)
    for life in range(times + 1):
        pods = [
            member(reported or kubelet.terminated(70, "EngineCrashed"), worker=worker, uid=f"life-{life}")
            for worker in (0, 1)
        ]
        computed = compute(*pods, old=computed, now=now + timedelta(seconds=apart * life))
    return computed
