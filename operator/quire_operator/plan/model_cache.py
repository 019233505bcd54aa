"""The lifecycle of a shared model volume: when pods wait for the download, when it restarts, when the claim
is deleted.

A Job is immutable, so it is replaced rather than changed; one that completed stays as it is, whatever would
be rendered now. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime

from quire_operator import names
from quire_operator.observed import (
    WORKLOAD_KINDS,
    Body,
    Observed,
    Ref,
    ended,
    pod_template,
    ref,
    seconds_since,
    served_model,
)
from quire_operator.resources import Manifest, RenderedRevision

# A download that failed for good is tried again after this: what it lacked may exist by now, without an
# event.
RETRY_SECONDS = 300.0
# A pod that downloads for itself fetches everything again, so a model that is corrupt at its source is tried
# rarely.
OWN_RETRY_SECONDS = 600.0
_POD_KINDS = (*WORKLOAD_KINDS, "HorizontalPodAutoscaler", "ScaledObject")


def blocked_by_download(desired: Iterable[Body], observed: Observed) -> frozenset[Ref]:
    """What is not applied before the download completes: a Deployment, which goes on serving the previous
    model, and its autoscaler as long as there is no Deployment.
    """
    wanted = {ref(manifest): manifest for manifest in desired}
    jobs = [target for target in wanted if target.kind == "Job"]
    if all(_is_done(observed.children.get(job)) for job in jobs):
        return frozenset()
    blocked: set[Ref] = set()
    for target, workload in wanted.items():
        live = observed.children.get(target)
        if target.kind not in WORKLOAD_KINDS or (
            live is not None and served_model(live) == served_model(workload)
        ):
            continue  # the model was downloaded before, and is only verified again
        late = _POD_KINDS if live is None else (target.kind,)
        blocked |= {Ref(kind, target.name) for kind in late}
    return frozenset(blocked & wanted.keys())


def is_claim_in_use(claim: Body, observed: Observed) -> bool:
    """Whether the claim must stay: it is retained, or pods use it or may soon."""
    specs = [pod["spec"] for pod in (*observed.pods, *observed.workers, *observed.download_pods)]
    templates = [one["spec"] for one in observed.replica_sets if one["spec"].get("replicas")]
    specs += [spec["template"]["spec"] for spec in templates]
    specs += [
        pod_template(live).get("spec") or {}
        for target, live in observed.children.items()
        if target.kind in WORKLOAD_KINDS
    ]
    name = claim["metadata"]["name"]
    return not claim["metadata"].get("ownerReferences") or any(name in _claims(spec) for spec in specs)


def downloaded_by(revision: RenderedRevision | None) -> frozenset[Ref]:
    """The claim of a revision's model and the Job that filled it. While both are there, a rollback to the
    revision needs no download.
    """
    children = () if revision is None else revision.children
    return frozenset(ref(child) for child in children if child["kind"] in ("PersistentVolumeClaim", "Job"))


def restarted_downloads(
    desired: Iterable[Manifest], observed: Observed, corrupt: Mapping[str, str], now: datetime
) -> Iterator[tuple[Ref, str, str]]:
    """What is deleted so that its successor downloads again: the object, its uid and why. `desired`: with
    applied hashes. `corrupt`: when each pod, by name, ended because of a corrupt model.
    """
    for job in desired:
        if job["kind"] != "Job":
            continue
        live = observed.children.get(ref(job))
        why = "" if live is None else _why_restarted(job, live, corrupt, now)
        if live is not None and why and "deletionTimestamp" not in live["metadata"]:
            yield ref(live), str(live["metadata"]["uid"]), why
    for pod in observed.pods:
        name, about = str(pod["metadata"]["name"]), pod["metadata"]
        fetches = any(one.get("name") == names.FETCHER for one in pod["spec"].get("initContainers") or ())
        age = seconds_since(str(about.get("creationTimestamp", "")), now)
        if name in corrupt and fetches and age >= OWN_RETRY_SECONDS:
            yield ref(pod), str(about["uid"]), "its model is corrupt"


def _why_restarted(job: Body, live: Body, corrupt: Mapping[str, str], now: datetime) -> str:
    if _is_done(live):
        done = str((live.get("status") or {}).get("completionTime", ""))
        return "a pod found the model corrupt" if any(time > done for time in corrupt.values()) else ""
    wanted, has = (
        (body["metadata"].get("annotations") or {}).get(names.ANNOTATION_APPLIED_HASH) for body in (job, live)
    )
    if wanted != has:
        return "changed"
    failed = ended(live).get("Failed") or {}
    is_due = bool(failed) and seconds_since(str(failed.get("lastTransitionTime", "")), now) >= RETRY_SECONDS
    return "failed, and is tried again" if is_due else ""


def _is_done(job: Body | None) -> bool:
    return job is not None and "Complete" in ended(job)


def _claims(pod_spec: Body) -> set[str]:
    volumes = pod_spec.get("volumes") or ()
    return {str((volume.get("persistentVolumeClaim") or {}).get("claimName")) for volume in volumes}
