"""What of an LLMDeployment's children is kept and applied again until the spec changes.

Kept are the pods' template and what the pods work with. Who decides about the number of pods, and how they
are replaced, is not: that always follows the spec of now. Called by reconcile. What was stored is read as
foreign input, since whoever may write ControllerRevisions would else apply with the operator's rights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire_operator import names
from quire_operator.errors import SpecError
from quire_operator.resources.manifest import Manifest, metadata
from quire_operator.spec import LLMDeployment, Rollout, Spec, parse

KEPT_KINDS = (
    "ServiceAccount",
    "ConfigMap",
    "NetworkPolicy",
    "PersistentVolumeClaim",
    "Job",
    "Service",
    "PodDisruptionBudget",
    "Deployment",
)
# Their names go on after the LLMDeployment's.
_NAMED_BY_CONTENT = ("ConfigMap", "NetworkPolicy", "PersistentVolumeClaim", "Job")
_KEPT_OF_DEPLOYMENT = ("selector", "template")
_HASH_LENGTH = 10


@dataclass(frozen=True, kw_only=True)
class Kept:
    """One render. `name`: of its ControllerRevision, made from its content. `spec`: the user's, as it was."""

    name: str
    spec: Mapping[str, Any]
    children: tuple[Manifest, ...]

    @property
    def data(self) -> dict[str, Any]:
        """As it is stored."""
        return {"spec": dict(self.spec), "children": list(self.children)}


def kept(model: LLMDeployment, spec: Mapping[str, Any], children: Iterable[Manifest]) -> Kept:
    """What is to be kept of these children."""
    parts = tuple(_part(manifest) for manifest in children if manifest["kind"] in KEPT_KINDS)
    content = json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()
    name = f"{model.name}-{hashlib.sha256(content).hexdigest()[:_HASH_LENGTH]}"
    return Kept(name=name, spec=spec, children=parts)


def stored(model: LLMDeployment, name: str, data: Any) -> Kept | None:
    """What the ControllerRevision `name` keeps; None when that is not what the operator kept there."""
    children = data.get("children") if isinstance(data, Mapping) else None
    if not isinstance(children, list) or not all(_is_own(child, model) for child in children):
        return None
    found = kept(model, data.get("spec") or {}, children)
    deployments = [child for child in found.children if child["kind"] == "Deployment"]
    return found if found.name == name and len(deployments) == 1 else None


def with_kept(children: Iterable[Manifest], render: Kept) -> tuple[Manifest, ...]:
    """`children` as the operator renders them now, with what is kept in place of its own."""
    fresh = list(children)
    (own,) = [child for child in render.children if child["kind"] == "Deployment"]
    (place,) = [index for index, child in enumerate(fresh) if child["kind"] == "Deployment"]
    live = fresh[place]
    annotations = {names.ANNOTATION_RENDER_REVISION: render.name}
    deployment = {
        **own,
        "metadata": {**own["metadata"], "annotations": annotations},
        "spec": {**live["spec"], **own["spec"]},
    }
    return (
        *(child for child in render.children if child["kind"] != "Deployment"),
        *(child for child in fresh[:place] if child["kind"] not in KEPT_KINDS),
        deployment,
        *(child for child in fresh[place:] if child["kind"] not in KEPT_KINDS),
    )


def is_same(model: LLMDeployment, body: Mapping[str, Any], render: Kept) -> bool:
    """Whether `body` still asks for the pods that `render` was made for.

    Both specs are read by this operator, so that a field that the API has got since is no difference.
    """
    try:
        then = parse({**body, "spec": render.spec})
    except SpecError:
        return False
    return _of_pods(then.spec) == _of_pods(model.spec)


def _of_pods(spec: Spec) -> Spec:
    """The spec without what says how many pods there are, how they are replaced, and which Gateways lead to
    them.
    """
    rollout = Rollout(restart_id=spec.rollout.restart_id)
    networking = replace(spec.networking, http_route=None, inference_pool=None)
    return replace(
        spec, replicas=None, suspend=False, autoscaling=None, rollout=rollout, networking=networking
    )


def _part(manifest: Manifest) -> Manifest:
    if manifest["kind"] != "Deployment":
        return manifest
    return {**manifest, "spec": {key: manifest["spec"][key] for key in _KEPT_OF_DEPLOYMENT}}


def _is_own(child: Any, model: LLMDeployment) -> bool:
    """Whether the manifest is of a kept kind, in the LLMDeployment's namespace, and owned by it."""
    if not isinstance(child, dict) or child.get("kind") not in KEPT_KINDS:
        return False
    told, spec = child.get("metadata"), child.get("spec")
    if child["kind"] == "Deployment" and not (
        isinstance(spec, dict) and spec.keys() >= {*_KEPT_OF_DEPLOYMENT}
    ):
        return False
    owned = metadata(model, model.name)
    if not isinstance(told, dict):
        return False
    name = str(told.get("name"))
    by_content = child["kind"] in _NAMED_BY_CONTENT and name.startswith(f"{model.name}-")
    if told.get("namespace") != owned["namespace"] or not (name == model.name or by_content):
        return False
    is_retained = child["kind"] == "PersistentVolumeClaim" and "ownerReferences" not in told
    return is_retained or told.get("ownerReferences") == owned.get("ownerReferences")
