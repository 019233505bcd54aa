"""The rendered revision: the children that are stored in a ControllerRevision and re-applied until the spec
changes.

It holds the pod template and what the pods use, so that an upgrade of the operator does not roll every model.
The number of replicas, the update strategy and the list of adapters are not part of it: they always follow
the current spec. Stored
data is validated like foreign input, because a user who may write ControllerRevisions could otherwise have
the operator apply arbitrary objects with its own rights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire_operator import names
from quire_operator.errors import SpecError
from quire_operator.resources import adapters, network_policy
from quire_operator.resources.manifest import Manifest, metadata
from quire_operator.spec import LLMDeployment, Rollout, Spec, parse

REVISIONED_KINDS = (
    "ServiceAccount",
    "ConfigMap",
    "NetworkPolicy",
    "PersistentVolumeClaim",
    "Job",
    "Service",
    "PodDisruptionBudget",
    "Deployment",
    names.GROUP_KIND,
)
# Kinds whose names extend the LLMDeployment's name.
_NAMED_BY_CONTENT = ("ConfigMap", "NetworkPolicy", "PersistentVolumeClaim", "Job")
# Of the kinds of which one runs the pods.
_WORKLOAD_FIELDS = {"Deployment": ("selector", "template"), names.GROUP_KIND: ("leaderWorkerTemplate",)}
_HASH_LENGTH = 10


@dataclass(frozen=True, kw_only=True)
class RenderedRevision:
    """`name`: of its ControllerRevision, with a hash of the content. `spec`: the user's, as it was then."""

    name: str
    spec: Mapping[str, Any]
    children: tuple[Manifest, ...]

    @property
    def data(self) -> dict[str, Any]:
        """The content of the ControllerRevision."""
        return {"spec": dict(self.spec), "children": list(self.children)}


def render_revision(
    model: LLMDeployment, spec: Mapping[str, Any], children: Iterable[Manifest]
) -> RenderedRevision:
    """The revision that consists of these children, as far as they belong to it."""
    parts = tuple(_part(manifest) for manifest in children if _is_revisioned(manifest, model.name))
    content = json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()
    name = f"{model.name}-{hashlib.sha256(content).hexdigest()[:_HASH_LENGTH]}"
    return RenderedRevision(name=name, spec=spec, children=parts)


def parse_stored(model: LLMDeployment, name: str, data: Any) -> RenderedRevision | None:
    """The revision stored in the ControllerRevision `name`; None when its data is not what the operator
    stored, or when it is one of groups of pods and the present spec has none, or the other way round.
    """
    children = data.get("children") if isinstance(data, Mapping) else None
    if not isinstance(children, list) or not all(_is_own(child, model) for child in children):
        return None
    found = render_revision(model, data.get("spec") or {}, children)
    workloads = [child for child in found.children if child["kind"] in _WORKLOAD_FIELDS]
    by_name = _workloads(found.children)
    kinds = {child["kind"] for child in workloads}
    wanted = {names.GROUP_KIND if model.is_grouped else "Deployment"}
    is_whole = kinds == wanted and len(by_name) == len(workloads) and model.name in by_name
    return found if found.name == name and is_whole else None


def with_revision(children: Iterable[Manifest], revision: RenderedRevision) -> tuple[Manifest, ...]:
    """`children` as they are rendered now, with those of the stored revision in place of their
    counterparts. After a rollback across a change of roles, a role that only the revision has gets one pod,
    and what belongs to a role that it has not is left out.
    """
    rendered = list(children)
    now, then = _workloads(rendered), _workloads(revision.children)
    place = max(index for index, child in enumerate(rendered) if child["kind"] in _WORKLOAD_FIELDS)
    main = rendered[place]  # that of the pods that clients talk to comes last
    dropped = now.keys() - then.keys()
    others = [
        (index, child)
        for index, child in enumerate(rendered)
        if not _is_revisioned(child, main["metadata"]["name"]) and child["metadata"]["name"] not in dropped
    ]
    one_pod = {**main, "spec": {**main["spec"], "replicas": min(1, main["spec"]["replicas"])}}
    annotations = {names.ANNOTATION_RENDER_REVISION: revision.name}
    workloads = [
        {
            **own,
            "metadata": {**own["metadata"], "annotations": annotations},
            "spec": {**now.get(name, one_pod)["spec"], **own["spec"]},
        }
        for name, own in then.items()
    ]
    return (
        *(child for child in revision.children if child["kind"] not in _WORKLOAD_FIELDS),
        *(child for index, child in others if index < place),
        *workloads,
        *(child for index, child in others if index > place),
    )


def renders_same_pods(model: LLMDeployment, body: Mapping[str, Any], revision: RenderedRevision) -> bool:
    """Whether `body` still specifies the pods that `revision` was rendered for.

    Both specs are parsed by this release, so that a field that the API has gained since is no difference.
    """
    try:
        then = parse({**body, "spec": revision.spec})
    except SpecError:
        return False
    return _pod_relevant(then) == _pod_relevant(model)


def _is_revisioned(manifest: Manifest, name: str) -> bool:
    """`name`: of the LLMDeployment. Its list of adapters is followed by pods that run."""
    is_list = manifest["kind"] == "ConfigMap" and manifest["metadata"]["name"] == names.adapters(name)
    return manifest["kind"] in REVISIONED_KINDS and not is_list


def _pod_relevant(model: LLMDeployment) -> tuple[Spec, object]:
    """The spec without the fields for the number of pods, their update strategy, and Gateways; of adapters
    what pods mount and connect to for them.
    """
    spec = model.spec
    rollout = Rollout(restart_id=spec.rollout.restart_id)
    networking = replace(spec.networking, http_route=None, inference_pool=None)
    roles = spec.disaggregation
    if roles is not None:
        roles = replace(roles, prefill=replace(roles.prefill, replicas=1, autoscaling=None))
    needed = (adapters.mounted(model), network_policy.ports_of_adapters(model))
    rest = replace(
        spec,
        adapters=(),
        disaggregation=roles,
        replicas=1,
        suspend=False,
        autoscaling=None,
        rollout=rollout,
        networking=networking,
    )
    return rest, needed


def _workloads(children: Iterable[Manifest]) -> dict[str, Manifest]:
    """What runs the pods, by name."""
    return {str(child["metadata"]["name"]): child for child in children if child["kind"] in _WORKLOAD_FIELDS}


def _part(manifest: Manifest) -> Manifest:
    kept = _WORKLOAD_FIELDS.get(manifest["kind"])
    if kept is None:
        return manifest
    return {**manifest, "spec": {key: manifest["spec"][key] for key in kept}}


def _is_own(child: Any, model: LLMDeployment) -> bool:
    """Whether the manifest is of a revisioned kind, in the LLMDeployment's namespace, and owned by it."""
    if not isinstance(child, dict) or child.get("kind") not in REVISIONED_KINDS:
        return False
    about, spec = child.get("metadata"), child.get("spec")
    needed = {*_WORKLOAD_FIELDS.get(child["kind"], ())}
    if needed and not (isinstance(spec, dict) and spec.keys() >= needed):
        return False
    owned = metadata(model, model.name)
    if not isinstance(about, dict):
        return False
    name = str(about.get("name"))
    by_content = child["kind"] in _NAMED_BY_CONTENT and name.startswith(f"{model.name}-")
    of_a_role = name in (model.name, names.workload(model.name, names.ROLE_PREFILL))
    if about.get("namespace") != owned["namespace"] or not (of_a_role or by_content):
        return False
    is_retained = child["kind"] == "PersistentVolumeClaim" and "ownerReferences" not in about
    return is_retained or about.get("ownerReferences") == owned.get("ownerReferences")


def controller_revision(
    model: LLMDeployment, revision: RenderedRevision, *, number: int, rollback_to: str
) -> Manifest:
    """The ControllerRevision that stores `revision`. The highest `number` is the one in use; `rollback_to`:
    name of the last revision that was Ready, empty where none was.
    """
    annotations = {"annotations": {names.ANNOTATION_ROLLBACK_TO: rollback_to}} if rollback_to else {}
    return {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": {**metadata(model, revision.name), **annotations},
        "revision": number,
        "data": revision.data,
    }
