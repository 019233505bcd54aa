"""Every reason for which an LLMDeployment does not serve, with what to do about it: the one table of them.

`status` takes its messages from here, the documentation is generated from it. Reasons that a server reports
by itself (termination log, /statusz) and reasons that only Kubernetes can see stand side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

STALLED_AFTER_FAILURES = 2


@dataclass(frozen=True)
class Reason:
    """`final`: the same failure twice means that no retry will help until the spec or the model changes."""

    name: str
    what: str
    remedy: str
    final: bool = False
    exit_code: int | None = None  # with which the server ends for it


_ALL = (
    Reason(
        "ModelNotFound",
        "the model or one of its files is not where spec.model.source says",
        "check spec.model.source, and for a claim its path and what it holds",
        final=True,
        exit_code=66,
    ),
    Reason(
        "ModelCorrupt",
        "a file of the model cannot be read as what it should be, or differs from the manifest's checksum",
        "copy the model into the volume again; where it is downloaded, delete the pod",
        final=True,
        exit_code=65,
    ),
    Reason(
        "ModelAccessDenied",
        "the source of the model refuses to give it",
        "correct the Secret with the credentials, and accept the model's terms where it is published",
        final=True,
        exit_code=77,
    ),
    Reason(
        "ModelDownloadFailed",
        "the model could not be downloaded",
        "check the network, the proxy and the source that the message names; it is tried again",
        exit_code=69,
    ),
    Reason(
        "OutOfDisk",
        "the volume has no room for the model, or cannot be written",
        "enlarge the volume; what is there already is continued",
        final=True,
        exit_code=73,
    ),
    Reason(
        "ConfigError",
        "the server refused its configuration",
        "correct spec.engine (the message names the setting), or the Secret that the pod refers to",
        final=True,
        exit_code=2,
    ),
    Reason(
        "StartupTimeout",
        "the model was still loading when health.startupTimeoutSeconds had passed",
        "raise spec.health.startupTimeoutSeconds, or use faster storage",
        exit_code=74,
    ),
    Reason(
        "LoadStalled",
        "loading the model made no progress for health.loadStallTimeoutSeconds",
        "check the storage behind the model's volume, or raise spec.health.loadStallTimeoutSeconds",
        exit_code=75,
    ),
    Reason(
        "OOMKilled",
        "the container used more memory than its limit and was killed",
        "raise spec.resources.memory, or lower spec.engine.kvCache.memory or spec.engine.maxModelLen",
    ),
    Reason(
        "EngineCrashed",
        "the inference engine ended unexpectedly",
        "read the log of the ended container (kubectl logs --previous)",
        exit_code=70,
    ),
    Reason(
        "ServerExited",
        "the server ended with success while it should have served",
        "read the log of the ended container (kubectl logs --previous): if it was asked to stop, its probes "
        "were not answered in time (raise spec.resources.cpu); else spec.engine.extraArgs made it end",
        exit_code=0,
    ),
    Reason(
        "EngineStalled",
        "the engine had work and made no step for health.stallTimeoutSeconds, so its pod is restarted",
        "read the pod's log; if one step may take that long, raise spec.health.stallTimeoutSeconds",
        exit_code=71,
    ),
    Reason(
        "CanaryMismatch",
        "the engine repeats its recorded answer with other tokens: its weights or its device are corrupt",
        "delete the pod so that it loads again; if it comes back, suspect the node's memory or device",
    ),
    Reason(
        "CanaryStale",
        "the engine has not proved for too long that it can still answer",
        "read the pod's log; an overloaded node can cause it",
    ),
    Reason(
        "ImagePullFailed",
        "the node cannot pull the server's image",
        "check the image that the operator was installed with, and that the node can reach its registry",
    ),
    Reason(
        "WaitingForNode",
        "no node can take the pod",
        "lower spec.resources, correct spec.scheduling, or add a node",
    ),
    Reason(
        "VolumePending",
        "the model's volume is not there or cannot be mounted",
        "check that the claim in spec.model.source.pvc is in this namespace and bound, and that the Secret "
        "of spec.security.apiKeysSecretRef exists",
    ),
    Reason(
        "OwnershipConflict",
        "an object of a name that is needed exists and belongs to somebody else",
        "delete or rename that object, or give the LLMDeployment another name",
        final=True,
    ),
    Reason(
        "QuotaExceeded",
        "a ResourceQuota of the namespace does not allow the pods",
        "have the quota raised, or lower spec.replicas or spec.resources",
    ),
    Reason(
        "ApplyRejected",
        "the API server refused an object that this LLMDeployment needs",
        "correct the field that the message names; if it names none, a policy of the cluster refused",
        final=True,
    ),
    Reason(
        "ApplyFailed",
        "the API server failed to store an object that this LLMDeployment needs; it is tried again and again",
        "mend what the message names, such as an admission webhook that does not answer; else read the API "
        "server's log",
    ),
    Reason(
        "ProgressDeadlineExceeded",
        "the rollout made no progress for longer than loading may take",
        "look at the newest pods (kubectl describe pod) and correct the spec",
        final=True,
    ),
    Reason(
        "RolledBack",
        "the rollout of the newest spec failed, and the last revision that was Ready serves again",
        "correct the spec: its next edit is tried; with spec.rollout.autoRollback off this one is, too",
        final=True,
    ),
    Reason(
        "MetricsUnavailable",
        "the autoscaler cannot read the metrics of the pods, and keeps their number as it is",
        "look at the metrics adapter's pods and, with backend HPA, at the APIService "
        "v1beta2.custom.metrics.k8s.io (kubectl describe); if that belongs to somebody else, set "
        "spec.autoscaling.backend to External",
    ),
    Reason(
        "KEDAMissing",
        "KEDA is to decide about the number of pods, and is not installed",
        "install KEDA 2.17 or newer (it is found by itself then), or drop spec.autoscaling.idle and fallback "
        "and set backend to HPA",
    ),
    Reason(
        "ActivatorMissing",
        "nobody holds the first request while no pod runs: it fails, and wakes nothing",
        "name what holds requests in spec.autoscaling.idle.activator, such as KEDA's HTTP add-on, or drop "
        "spec.autoscaling.idle",
    ),
    Reason(
        "ConflictingAutoscaler",
        "the Deployment has an autoscaler that the operator did not make",
        "delete it, or let it decide: drop spec.replicas and set spec.autoscaling.backend to External",
    ),
    Reason(
        "MissingCRD",
        "a kind that the spec asks for is not installed in this cluster; what else serves goes on",
        "install the Gateway API (HTTPRoute) or its inference extension (InferencePool), which is found by "
        "itself then, or drop spec.networking.httpRoute or inferencePool",
    ),
    Reason(
        "RouteNotAccepted",
        "a Gateway does not take the HTTPRoute",
        "correct spec.networking.httpRoute, or have the Gateway's listener allow routes of this namespace",
    ),
    Reason(
        "InvalidSpec",
        "a field of the spec cannot be used",
        "correct the field that the message names",
        final=True,
    ),
)

REASONS = {reason.name: reason for reason in _ALL}
BY_EXIT_CODE = {reason.exit_code: reason.name for reason in _ALL if reason.exit_code is not None}


def message(reason: str, detail: str = "") -> str:
    """What happened, what is known of it, and what to do."""
    entry = REASONS[reason]
    known = f" ({detail.rstrip('.')})" if detail else ""
    return f"{entry.what[0].upper()}{entry.what[1:]}{known}. {entry.remedy[0].upper()}{entry.remedy[1:]}."
