"""What is done about a shared model: pods wait until it is there, a Job that has ended is made anew when that
helps, a claim goes when nobody serves from it any more.

Called by `make_plan` and by reconcile. A Job cannot be changed, so it is replaced; one that is done stays as
it is, whatever would be rendered now. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime

from quire_operator import names
from quire_operator.observed import Body, Observed, Ref, ended, ref, seconds_since, served_model

# After a download that has failed for good; what it lacked may have been mended where nobody tells us.
RETRY_SECONDS = 300.0
# A pod of its own download fetches everything again; a model that is wrong at its source costs no more.
OWN_RETRY_SECONDS = 600.0
_OF_PODS = ("Deployment", "HorizontalPodAutoscaler", "ScaledObject")


def waiting(desired: Iterable[Body], observed: Observed) -> frozenset[Ref]:
    """What is not applied before the model is there: the Deployment, which goes on serving another one
    meanwhile, and while there is none its autoscaler.
    """
    by_kind = {str(manifest["kind"]): manifest for manifest in desired}
    job, deployment, live = by_kind.get("Job"), by_kind.get("Deployment"), observed.child("Deployment")
    if job is None or deployment is None or _is_done(observed.children.get(ref(job))):
        return frozenset()
    if live is not None and served_model(live) == served_model(deployment):
        return frozenset()  # it was there once, and is only looked at again
    late = _OF_PODS if live is None else _OF_PODS[:1]
    return frozenset(ref(by_kind[kind]) for kind in late if kind in by_kind)


def is_served_from(claim: Body, observed: Observed) -> bool:
    """Whether a claim of ours must stay: it is to be retained, or somebody serves from it or may soon."""
    deployment = observed.child("Deployment")
    specs = [pod["spec"] for pod in (*observed.pods, *observed.fetchers)]
    templates = [one["spec"] for one in observed.replica_sets if one["spec"].get("replicas")]
    templates += [deployment["spec"]] if deployment is not None else []
    specs += [spec["template"]["spec"] for spec in templates]
    name = claim["metadata"]["name"]
    return not claim["metadata"].get("ownerReferences") or any(name in _claims(spec) for spec in specs)


def renewals(
    jobs: Iterable[Body], observed: Observed, corrupt: Mapping[str, str], now: datetime
) -> Iterator[tuple[Ref, str, str]]:
    """What is deleted so that its successor fetches again, with its uid and why. `jobs`: those desired, with
    the hashes of what would be applied. `corrupt`: when the pods of these names ended for a corrupt model.
    """
    for job in jobs:
        live = observed.children.get(ref(job))
        why = "" if live is None else _why_renewed(job, live, corrupt, now)
        if live is not None and why and "deletionTimestamp" not in live["metadata"]:
            yield ref(live), str(live["metadata"]["uid"]), why
    for pod in observed.pods:
        name, about = str(pod["metadata"]["name"]), pod["metadata"]
        fetches = any(one.get("name") == names.FETCHER for one in pod["spec"].get("initContainers") or ())
        age = seconds_since(str(about.get("creationTimestamp", "")), now)
        if name in corrupt and fetches and age >= OWN_RETRY_SECONDS:
            yield ref(pod), str(about["uid"]), "its model is corrupt"


def _why_renewed(job: Body, live: Body, corrupt: Mapping[str, str], now: datetime) -> str:
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
