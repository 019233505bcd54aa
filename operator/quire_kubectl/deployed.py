"""What the cluster holds of one LLMDeployment, and how its operator was set up, read through kubectl.

Called by ``render`` and ``plan``. Reads into the operator's own frozen values, so that its pure code decides
here what it decides there; what the user may not read is assumed, and said to be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from quire_kubectl import kubectl
from quire_kubectl.kubectl import Document, KubectlError
from quire_operator import names, resources, spec, status
from quire_operator.errors import SettingsError
from quire_operator.observed import Observed, is_made_by_keda, is_ours, ref, scales_deployment, workload
from quire_operator.plan import revisions
from quire_operator.resources import Kept, Manifest
from quire_operator.settings import Settings
from quire_operator.spec import LLMDeployment, Profile, profiles

_RELATED = (
    "serviceaccounts,configmaps,networkpolicies,services,poddisruptionbudgets,horizontalpodautoscalers,"
    "deployments,replicasets,pods,controllerrevisions,persistentvolumeclaims,jobs"
)
_OPTIONAL = {
    "ScaledObject": "scaledobjects.keda.sh",
    "HTTPRoute": "httproutes.gateway.networking.k8s.io",
    "InferencePool": "inferencepools.inference.networking.k8s.io",
}
_NOT_INSTALLED = "the server doesn't have a resource type"
_OPERATORS = "app.kubernetes.io/name=quire-operator"
_UNKNOWN_IMAGE = "the-operators-engine-image"


@dataclass(frozen=True, kw_only=True)
class Live:
    """What there is. `kept`: what the ControllerRevisions keep, by their names."""

    observed: Observed
    revisions: tuple[Document, ...] = ()

    @property
    def kept(self) -> Mapping[str, Any]:
        return {str(one["metadata"]["name"]): one.get("data") for one in self.revisions}


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """The children that the operator would apply. `is_kept`: as they were rendered before, not anew."""

    model: LLMDeployment
    children: tuple[Manifest, ...]
    name: str
    is_kept: bool


def in_file(path: str, namespace: str | None) -> list[Document]:
    """The LLMDeployments of a file; kubectl reads it, as it would for `kubectl apply`."""
    scope = ["--namespace", namespace] if namespace else []
    given = ["create", "--dry-run=client", "--validate=ignore", "-f", path, *scope]
    found = [body for body in kubectl.documents(given) if body.get("kind") == names.KIND]
    if not found:
        raise KubectlError(f"{path} holds no {names.KIND}: give a manifest with one")
    return found


def by_name(name: str, namespace: str | None) -> Document:
    """As it is stored."""
    scope = ["--namespace", namespace] if namespace else []
    (body,) = kubectl.documents(["get", kubectl.LLM_DEPLOYMENTS, name, *scope, "--show-managed-fields"])
    return body


def stored(body: Document) -> Document | None:
    """The same LLMDeployment as it is stored; None where there is none."""
    metadata = body["metadata"]
    found = kubectl.documents(
        [
            *("get", kubectl.LLM_DEPLOYMENTS, "--namespace", metadata["namespace"], "--show-managed-fields"),
            *("--field-selector", f"metadata.name={metadata['name']}"),
        ]
    )
    return found[0] if found else None


def live(body: Document, model: LLMDeployment) -> Live:
    """All objects of the LLMDeployment `body`, which is stored, as far as `model` asks for their kinds."""
    scope = ["--namespace", model.namespace, "--show-managed-fields"]
    label = ["-l", f"{names.LABEL_NAME}={model.name}"]
    related = kubectl.documents(["get", _RELATED, *scope, *label])
    others = kubectl.documents(["get", "horizontalpodautoscalers", *scope])
    missing = set()
    for kind, plural in _OPTIONAL.items():
        try:
            related += kubectl.documents(["get", plural, *scope, *label])
        except KubectlError as error:
            if _NOT_INSTALLED not in str(error):
                raise
            missing.add(kind)
    uid = str(body["metadata"]["uid"])
    wanted = {*resources.KEPT_KINDS, *_OPTIONAL, "HorizontalPodAutoscaler"}
    children = [one for one in related if one["kind"] in wanted and is_ours(one, uid)]
    scalers = [one for one in others if scales_deployment(one, model.name) and not is_ours(one, uid)]
    sets, pods, fetchers = workload(children, related)
    observed = Observed(
        body=body,
        children={ref(one): one for one in children},
        rivals=tuple(one for one in scalers if not is_made_by_keda(one, model.name)),
        made_by_keda=next((one for one in scalers if is_made_by_keda(one, model.name)), None),
        missing=frozenset(missing),
        replica_sets=tuple(sets),
        pods=tuple(pods),
        fetchers=tuple(fetchers),
    )
    kept = [one for one in related if one["kind"] == "ControllerRevision" and is_ours(one, uid)]
    return Live(observed=observed, revisions=tuple(kept))


def rendered(body: Document, settings: Settings, there: Live | None, now: datetime) -> Rendered:
    """What the operator would make of `body`, as its reconcile decides it. Raises QuireOperatorError."""
    model = spec.parse(body)
    name = f"keda-hpa-{model.name}" if model.autoscaler == "KEDA" else model.name
    scalers = [] if there is None else [*there.observed.children.values(), *there.observed.rivals]
    if there is not None and there.observed.made_by_keda is not None:
        scalers.append(there.observed.made_by_keda)
    is_scaler = (b for b in scalers if str(ref(b)) == f"HorizontalPodAutoscaler {name}")
    measured = status.measured(body, next(is_scaler, None))
    fresh = resources.build(model, settings, measured, _profile(model))
    anew = resources.kept(model, body["spec"], fresh)
    asked = anew if there is None else _asked(model, body, anew, there, now)
    force = asked
    if there is not None:
        back, _ = revisions.rollback(model, asked.name, revisions.history(there.revisions))
        force = (resources.stored(model, back, there.kept.get(back)) if back else None) or asked
    children = resources.with_kept(fresh, force)
    return Rendered(model=model, children=children, name=force.name, is_kept=force is not anew)


def _profile(model: LLMDeployment) -> Profile | None:
    """The AcceleratorProfile that the spec names. Raises KubectlError where it is not there."""
    reference = model.spec.resources.profile_ref
    if reference is None:
        return None
    return profile(reference.name)


def profile(name: str, *options: str) -> Profile:
    """The cluster's AcceleratorProfile. Raises KubectlError without one, SpecError for a bad one."""
    (found,) = kubectl.documents(["get", "acceleratorprofiles.serving.quire.dev", name, *options])
    return profiles.parse(found)


def _asked(model: LLMDeployment, body: Document, anew: Kept, there: Live, now: datetime) -> Kept:
    """What was rendered before stays while the spec asks for the same, unless it fails and never served."""
    past = revisions.history(there.revisions)
    if not past or past[-1].name == anew.name or model.spec.rollout.adopt_operator_defaults == "Always":
        return anew
    newest = resources.stored(model, past[-1].name, there.kept.get(past[-1].name))
    if newest is None or not resources.is_same(model, body, newest):
        return anew
    observed = replace(there.observed, body=body)
    never_served = revisions.is_unfinished(newest.name, observed)
    return anew if never_served and status.is_failing(model, observed, now=now) else newest


def settings(namespace: str, there: Live | None) -> tuple[Settings, str]:
    """The operator's settings for LLMDeployments in `namespace`, and a sentence: where they are from."""
    for scope in (["--all-namespaces"], ["--namespace", "quire-system"]):
        try:
            found = kubectl.documents(["get", "deployments", *scope, "-l", _OPERATORS])
        except KubectlError:  # most users may not read that
            continue
        for deployment in found:
            read = _of_operator(deployment)
            if read is not None and (not read.watch_namespaces or namespace in read.watch_namespaces):
                metadata = deployment["metadata"]
                return read, f"Settings are those of Deployment {metadata['namespace']}/{metadata['name']}."
    return _of_children([] if there is None else there.observed.children.values())


def _of_operator(deployment: Document) -> Settings | None:
    containers = deployment["spec"]["template"]["spec"]["containers"]
    environ = {
        str(entry["name"]): str(entry.get("value", ""))
        for entry in containers[0].get("env", ())
        if "value" in entry
    }
    try:
        return Settings.from_environ({**environ, "POD_NAMESPACE": deployment["metadata"]["namespace"]})
    except SettingsError:
        return None


def _of_children(children: Iterable[Mapping[str, Any]]) -> tuple[Settings, str]:
    """What the pods that run were made with; the rest is as the chart has it."""
    by_kind = {str(child["kind"]): child for child in children}
    if "Deployment" not in by_kind:
        return (
            Settings(engine_image=_UNKNOWN_IMAGE),
            "The operator's Deployment cannot be read here: the engine's image is left open, and all other "
            "settings are assumed to be the chart's defaults.",
        )
    server = by_kind["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    read = Settings(
        engine_image=str(server["image"]),
        engine_image_pull_policy=str(server.get("imagePullPolicy", "IfNotPresent")),
    )
    told = (
        "The operator's Deployment cannot be read here: image and pull policy are those of the pods' template"
    )
    try:
        watchers = by_kind["NetworkPolicy"]["spec"]["ingress"][1]["from"]
        labels = [dict(peer["namespaceSelector"]["matchLabels"]) for peer in watchers]
        read = replace(
            read,
            operator_namespace=str(next(iter(labels[0].values()))),
            monitoring_namespace_labels=tuple(labels[1].items()),
        )
    except (KeyError, IndexError, StopIteration):
        return read, f"{told}, all other settings are assumed to be the chart's defaults."
    return (
        read,
        f"{told}, namespaces those of its NetworkPolicy, the rest is assumed to be the chart's default.",
    )
