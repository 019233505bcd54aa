"""Reads the live objects of one LLMDeployment and the settings of its operator through kubectl.

They are read into the operator's own frozen values, so that its pure code decides here as it does in the
cluster. What the user may not read is assumed, and the output says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from quire_kubectl import kubectl
from quire_kubectl.kubectl import Document, KubectlError
from quire_operator import names, resources, spec, status
from quire_operator.errors import SettingsError
from quire_operator.observed import (
    WORKLOAD_KINDS,
    Observed,
    find_workload,
    is_keda_autoscaler,
    is_owned,
    pod_template,
    ref,
    scales_workload,
)
from quire_operator.plan import revisions
from quire_operator.resources import Manifest, RenderedRevision
from quire_operator.settings import Settings
from quire_operator.spec import LLMDeployment, Profile, profiles
from quire_operator.status import RequestedAccelerator

_RELATED = (
    "serviceaccounts,configmaps,networkpolicies,services,poddisruptionbudgets,horizontalpodautoscalers,"
    "deployments,replicasets,pods,controllerrevisions,persistentvolumeclaims,jobs"
)
_OPTIONAL = {
    "ScaledObject": "scaledobjects.keda.sh",
    "HTTPRoute": "httproutes.gateway.networking.k8s.io",
    "InferencePool": "inferencepools.inference.networking.k8s.io",
    names.GROUP_KIND: "leaderworkersets.leaderworkerset.x-k8s.io",
}
_NOT_INSTALLED = "the server doesn't have a resource type"
_OPERATORS = "app.kubernetes.io/name=quire-operator"
_PROFILES = "acceleratorprofiles.serving.quire.dev"
_UNKNOWN_IMAGE = "the-operators-engine-image"


@dataclass(frozen=True, kw_only=True)
class Live:
    """What the cluster holds of an LLMDeployment."""

    observed: Observed
    revisions: tuple[Document, ...] = ()

    @property
    def revision_data(self) -> Mapping[str, Any]:
        """The data of the ControllerRevisions, by name."""
        return {str(one["metadata"]["name"]): one.get("data") for one in self.revisions}


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """The children that the operator would apply. `is_stored`: from a stored revision, not rendered now.
    `accelerator`: the AcceleratorProfiles that the spec names.
    """

    model: LLMDeployment
    children: tuple[Manifest, ...]
    name: str
    is_stored: bool
    accelerator: RequestedAccelerator


def in_file(path: str, namespace: str | None) -> list[Document]:
    """The LLMDeployments in a file; kubectl reads it as for `kubectl apply`.

    An open file, as the pipe of `-f <(helm template ...)`, is read here: kubectl does not inherit it.
    """
    scope = ["--namespace", namespace] if namespace else []
    source, text = path, None
    if Path(path).is_fifo() or path.startswith("/dev/fd/"):
        try:
            source, text = "-", Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise KubectlError(f"{path} cannot be read: {error.strerror}") from error
    given = ["create", "--dry-run=client", "--validate=ignore", "-f", source, *scope]
    found = [body for body in kubectl.documents(given, text) if body.get("kind") == names.KIND]
    if not found:
        raise KubectlError(f"{path} holds no {names.KIND}: give a manifest with one")
    return found


def by_name(name: str, namespace: str | None) -> Document:
    """The stored LLMDeployment of that name."""
    scope = ["--namespace", namespace] if namespace else []
    (body,) = kubectl.documents(["get", kubectl.LLM_DEPLOYMENTS, name, *scope, "--show-managed-fields"])
    return body


def stored(body: Document) -> Document | None:
    """The stored version of this LLMDeployment; None where it does not exist."""
    metadata = body["metadata"]
    found = kubectl.documents(
        [
            *("get", kubectl.LLM_DEPLOYMENTS, "--namespace", metadata["namespace"], "--show-managed-fields"),
            *("--field-selector", f"metadata.name={metadata['name']}"),
        ]
    )
    return found[0] if found else None


def live(body: Document, model: LLMDeployment) -> Live:
    """The live objects of the stored LLMDeployment `body`."""
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
    wanted = {*resources.REVISIONED_KINDS, *_OPTIONAL, "HorizontalPodAutoscaler"}
    children = [one for one in related if one["kind"] in wanted and is_owned(one, uid)]
    scalers = [one for one in others if scales_workload(one, model.name) and not is_owned(one, uid)]
    found = find_workload(children, related)
    observed = Observed(
        body=body,
        children={ref(one): one for one in children},
        foreign_autoscalers=tuple(one for one in scalers if not is_keda_autoscaler(one, model.name)),
        keda_autoscaler=next((one for one in scalers if is_keda_autoscaler(one, model.name)), None),
        missing=frozenset(missing),
        replica_sets=found.replica_sets,
        pods=found.pods,
        workers=found.workers,
        download_pods=found.download_pods,
    )
    stored = [one for one in related if one["kind"] == "ControllerRevision" and is_owned(one, uid)]
    return Live(observed=observed, revisions=tuple(stored))


def rendered(body: Document, settings: Settings, live: Live | None, now: datetime) -> Rendered:
    """The children of `body` as the operator's reconcile would apply them. Raises QuireOperatorError."""
    model = spec.parse(body)
    name = f"keda-hpa-{model.name}" if model.autoscaler == "KEDA" else model.name
    scalers = [] if live is None else [*live.observed.children.values(), *live.observed.foreign_autoscalers]
    if live is not None and live.observed.keda_autoscaler is not None:
        scalers.append(live.observed.keda_autoscaler)
    is_scaler = (b for b in scalers if str(ref(b)) == f"HorizontalPodAutoscaler {name}")
    measurements = status.pod_measurements(body, next(is_scaler, None))
    prefill = None if model.prefill is None else _profile(model.prefill)
    accelerator = RequestedAccelerator(profile=_profile(model), prefill_profile=prefill)
    children = resources.build(model, settings, measurements, **accelerator.profiles)
    fresh = update = current = resources.render_revision(model, body["spec"], children)
    if live is not None:
        current = update = _update_revision(model, body, fresh, live, now)
        history = revisions.revision_history(live.revisions)
        rollback_to, _ = revisions.rollback_target(model, update.name, history)
        data = live.revision_data.get(rollback_to)
        current = (resources.parse_stored(model, rollback_to, data) if rollback_to else None) or update
    children = resources.with_revision(children, current)
    return Rendered(
        model=model,
        children=children,
        name=current.name,
        is_stored=current is not fresh,
        accelerator=accelerator,
    )


def _profile(model: LLMDeployment) -> Profile | None:
    """The AcceleratorProfile of the pods of a role. Raises KubectlError where it is not there."""
    reference = model.spec.resources.profile_ref
    if reference is None:
        return None
    return profile(reference.name)


def every_profile(*options: str) -> dict[str, Profile]:
    """The cluster's AcceleratorProfiles by name. Raises KubectlError, SpecError for a bad one."""
    found = kubectl.documents(["get", _PROFILES, *options])
    return {str(body["metadata"]["name"]): profiles.parse(body) for body in found}


def profile(name: str, *options: str) -> Profile:
    """The cluster's AcceleratorProfile. Raises KubectlError without one, SpecError for a bad one."""
    (found,) = kubectl.documents(["get", _PROFILES, name, *options])
    return profiles.parse(found)


def _update_revision(
    model: LLMDeployment, body: Document, fresh: RenderedRevision, live: Live, now: datetime
) -> RenderedRevision:
    """The stored revision while the spec specifies the same pods, unless they fail and were never rolled
    out.
    """
    history = revisions.revision_history(live.revisions)
    if (
        not history
        or history[-1].name == fresh.name
        or model.spec.rollout.adopt_operator_defaults == "Always"
    ):
        return fresh
    newest = resources.parse_stored(model, history[-1].name, live.revision_data.get(history[-1].name))
    if newest is None or not resources.renders_same_pods(model, body, newest):
        return fresh
    observed = replace(live.observed, body=body)
    never_served = revisions.was_never_rolled_out(newest.name, observed)
    return fresh if never_served and status.has_failing_pods(model, observed, now=now) else newest


def settings(namespace: str, live: Live | None) -> tuple[Settings, str]:
    """The operator's settings for LLMDeployments in `namespace`, and a sentence on where they come from."""
    for scope in (["--all-namespaces"], ["--namespace", "quire-system"]):
        try:
            found = kubectl.documents(["get", "deployments", *scope, "-l", _OPERATORS])
        except KubectlError:  # most users may not read it
            continue
        for deployment in found:
            read = _from_operator(deployment)
            if read is not None and (not read.watch_namespaces or namespace in read.watch_namespaces):
                metadata = deployment["metadata"]
                return read, f"Settings are those of Deployment {metadata['namespace']}/{metadata['name']}."
    return _from_children([] if live is None else live.observed.children.values())


def _from_operator(deployment: Document) -> Settings | None:
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


def _gateway(pod: Mapping[str, Any], namespace: str) -> dict[str, Any]:
    """Where the gateway's public keys are, as the pods mount them."""
    volumes = [each for each in pod.get("volumes", ()) if each["name"] == "gateway-keys"]
    if not volumes:
        return {}
    keys = str(volumes[0]["configMap"]["name"])
    return {"gateway_namespaces": (namespace,), "gateway_keys_config_map": keys}


def _from_children(children: Iterable[Mapping[str, Any]]) -> tuple[Settings, str]:
    """The settings that the live children show; the others are assumed to be the chart's defaults."""
    by_kind = {str(child["kind"]): child for child in children}
    workload = next((by_kind[kind] for kind in WORKLOAD_KINDS if kind in by_kind), None)
    if workload is None:
        return (
            Settings(engine_image=_UNKNOWN_IMAGE),
            "The operator's Deployment cannot be read here: the engine's image is left open, and all other "
            "settings are assumed to be the chart's defaults.",
        )
    pod = pod_template(workload)["spec"]
    server = pod["containers"][0]
    read = Settings(
        engine_image=str(server["image"]),
        engine_image_pull_policy=str(server.get("imagePullPolicy", "IfNotPresent")),
        engine_image_pull_secrets=tuple(str(secret["name"]) for secret in pod.get("imagePullSecrets", ())),
        # What the operator has applied, it allowed.
        allowed_env=tuple(
            str(variable["name"])
            for container in (server, *pod.get("initContainers", ()))
            for variable in container.get("env", ())
        ),
        credential_hosts=("*",),
        **_gateway(pod, str(workload["metadata"].get("namespace", ""))),
    )
    note = (
        "The operator's Deployment cannot be read here: image and pull policy are those of the pods' template"
    )
    try:
        watchers = by_kind["NetworkPolicy"]["spec"]["ingress"][-1]["from"]
        labels = [dict(peer["namespaceSelector"]["matchLabels"]) for peer in watchers]
        read = replace(
            read,
            operator_namespace=str(next(iter(labels[0].values()))),
            monitoring_namespace_labels=tuple(labels[1].items()),
        )
    except (KeyError, IndexError, StopIteration):
        return read, f"{note}, all other settings are assumed to be the chart's defaults."
    return (
        read,
        f"{note}, namespaces those of its NetworkPolicy, the rest is assumed to be the chart's default.",
    )
