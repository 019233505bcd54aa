"""The table of all reasons for which an LLMDeployment does not serve, each with its remedy.

`status` takes its messages from here, and docs/troubleshooting.md is generated from it. It holds the reasons
that a server reports (termination log, /statusz) and those that only Kubernetes can see.
"""

from __future__ import annotations

from dataclasses import dataclass

STALLED_AFTER_FAILURES = 2

ConditionValue = tuple[str, str, str]  # status, reason and message of a condition


@dataclass(frozen=True)
class Reason:
    """`final`: the same failure twice means that no retry will help until the spec or the model changes;
    `shown`: the condition that carries it, empty where nothing is degraded.
    """

    name: str
    what: str
    remedy: str
    final: bool = False
    exit_code: int | None = None  # of the server
    shown: str = "Degraded=True"


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
        "a file of the model is damaged, or differs from the manifest's checksum",
        "copy the model into the volume again; a downloaded one is downloaded again by itself, by a Job at "
        "once or, where pods download, by a new pod in ten minutes; if it comes back, publish it again",
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
        "enlarge the volume; the download then resumes",
        final=True,
        exit_code=73,
    ),
    Reason(
        "ConfigError",
        "the server refused its configuration",
        "correct spec.engine or spec.parallelism (the message names the setting), or the Secret that the pod "
        "refers to",
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
        "GPUOutOfMemory",
        "the GPU has too little memory for the model, its graphs or a step, and failing a request would not "
        "free enough",
        "lower spec.resources.gpu.memoryPercent (it leaves more to steps and graphs) or "
        "spec.engine.maxNumSeqs, serve a smaller or a quantised model, or choose a larger GPU",
        exit_code=76,
    ),
    Reason(
        "EngineCrashed",
        "a process of the server ended unexpectedly",
        "read the log of the ended container (kubectl logs --previous)",
        exit_code=70,
    ),
    Reason(
        "ServerExited",
        "the server exited with code 0 while it should have been serving",
        "read the log of the ended container (kubectl logs --previous): if it was asked to stop, its probes "
        "were not answered in time (raise spec.resources.cpu); else a flag in spec.engine.extraArgs made it "
        "exit",
        exit_code=0,
    ),
    Reason(
        "EngineStalled",
        "the engine does not run, or had work and made no step for health.stallTimeoutSeconds, so its pod is "
        "restarted",
        "read the pod's log; if one step may take that long, raise spec.health.stallTimeoutSeconds",
        exit_code=71,
    ),
    Reason(
        "ProcessStalled",
        "a process of the server does not run; after health.stallTimeoutSeconds its pod is restarted",
        "read the pod's log, and look at its node, which may be out of CPU or memory",
        exit_code=72,
    ),
    Reason(
        "CanaryMismatch",
        "the engine answers the canary with other tokens than it should: its weights or its device are "
        "corrupt; when it stays so for half of health.stallTimeoutSeconds, its pod is restarted",
        "nothing if the restart repairs it; if it comes back on one node, suspect that node's memory or "
        "device; if on every node new pods have other tokens than the pod that the message names, that one "
        "is damaged: delete it first, then the ConfigMap NAME-golden-tokens, and the next ready pod's are "
        "kept",
        exit_code=78,
    ),
    Reason(
        "MixedRevision",
        "the processes that divide a model do not run the same program with the same model and settings",
        "nothing if the restart repairs it; if it comes back, look whether something writes to the model's "
        "volume while pods start",
        exit_code=79,
    ),
    Reason(
        "CanaryStale",
        "the engine has neither answered a request nor completed the canary for too long",
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
        shown="Degraded=True, Scheduled=False",
    ),
    Reason(
        "WaitingForGPU",
        "no accelerator of the kind that is asked for is free",
        "add a node that has one, free one, or lower spec.replicas; a rollout goes on in place by itself",
        shown="Degraded=True, Scheduled=False",
    ),
    Reason(
        "WaitingForQuota",
        "Kueue has not admitted the pods",
        "look at the queue (kubectl describe localqueue): its quota is used up, or there is no queue of the "
        "name in spec.scheduling.queueName",
        shown="Degraded=True, Scheduled=False",
    ),
    Reason(
        "Evicted",
        "a pod had to leave its node",
        "nothing if the node was drained or reclaimed, since another pod replaces it; else free the "
        "resource that the message names",
        shown="",
    ),
    Reason(
        "Preempted",
        "a pod had to make room for one of a higher priority",
        "name a PriorityClass of a higher value in spec.scheduling.priorityClassName, or add a node",
        shown="",
    ),
    Reason(
        "NodeLost",
        "the node of a pod does not answer any more",
        "look at the node (kubectl describe node); its pod is replaced after five minutes, or at once when "
        "the node is deleted",
    ),
    Reason(
        "VolumePending",
        "the model's volume is not there or cannot be mounted",
        "check that the claim (of spec.model.source.pvc or spec.cache) is in this namespace and bound, that "
        "its class offers ReadWriteMany if that is asked for, and that the Secret of "
        "spec.security.apiKeysSecretRef exists",
    ),
    Reason(
        "OwnershipConflict",
        "an object with a name that is needed exists already and has another owner",
        "delete or rename that object, or give the LLMDeployment another name",
        final=True,
    ),
    Reason(
        "QuotaExceeded",
        "a ResourceQuota of the namespace does not allow the pods",
        "have the quota raised, or lower spec.replicas or spec.resources; a rollout goes on in place by "
        "itself where the end of an old pod makes room; if ModelCached has this reason, the quota has no "
        "room for the Job that downloads the model, which is retried by itself",
        shown="Degraded=True, Scheduled=False",
    ),
    Reason(
        "ApplyRejected",
        "the API server refused an object that this LLMDeployment needs",
        "correct the field that the message names; if it names none, a policy of the cluster refused the "
        "object",
        final=True,
    ),
    Reason(
        "ApplyFailed",
        "the API server failed to store an object that this LLMDeployment needs; it is tried again and again",
        "fix what the message names, such as an admission webhook that does not answer; else read the API "
        "server's log",
    ),
    Reason(
        "ProgressDeadlineExceeded",
        "the rollout made no progress for longer than loading may take",
        "look at the newest pods (kubectl describe pod) and correct the spec",
        final=True,
        shown="Stalled=True",
    ),
    Reason(
        "RolledBack",
        "the rollout of the newest spec failed, and the last revision that was Ready serves again",
        "correct the spec: its next edit is rolled out; with spec.rollout.autoRollback off the present one "
        "is, too",
        final=True,
    ),
    Reason(
        "MetricsUnavailable",
        "the autoscaler cannot read the metrics of the pods, and keeps their number as it is",
        "look at the metrics adapter's pods and, with backend HPA, at the APIService "
        "v1beta2.custom.metrics.k8s.io (kubectl describe); if that has another owner, set "
        "spec.autoscaling.backend to External",
        shown="ScalingActive=False",
    ),
    Reason(
        "MetricsAdapterMissing",
        "this operator has no metrics adapter, so nothing tells the HorizontalPodAutoscaler the load, and "
        "the number of pods stays as it is",
        "have Quire installed for all namespaces (watchNamespaces empty) with metricsAdapter.enabled, or "
        "drop spec.autoscaling and set spec.replicas, or set spec.autoscaling.backend to External",
        shown="ScalingActive=False",
    ),
    Reason(
        "KEDAMissing",
        "the autoscaling backend is KEDA, which is not installed",
        "install KEDA 2.17 or newer (it is found by itself then), or drop spec.autoscaling.idle.activator "
        "and fallback and set backend to HPA",
        shown="ScalingActive=False",
    ),
    Reason(
        "ActivatorMissing",
        "no activator holds the first request while no pod runs: the request fails and starts no pod",
        "name what holds requests in spec.autoscaling.idle.activator, such as KEDA's HTTP add-on, or set "
        "spec.autoscaling.backend to HPA where Quire's gateway passes requests on",
        shown="ActivatorReady=False",
    ),
    Reason(
        "GatewayMissing",
        "no gateway holds requests while no pod runs, so pods run all the time",
        "have gateway.enabled set in the chart, and this namespace among gateway.namespaces, or drop "
        "spec.autoscaling.idle and set minReplicas above 0",
        shown="ActivatorReady=False",
    ),
    Reason(
        "PoolWithoutGateway",
        "no gateway says which model of the pool is asked for, so the accelerator stays with the one "
        "that has it",
        "have gateway.enabled set in the chart, and this namespace among gateway.namespaces, or drop "
        "spec.sharing",
        shown="ActivatorReady=False",
    ),
    Reason(
        "ConflictingAutoscaler",
        "the Deployment has an autoscaler that the operator did not make",
        "delete it, or let it decide: drop spec.replicas and set spec.autoscaling.backend to External",
        shown="ScalingActive=False",
    ),
    Reason(
        "DoesNotFit",
        "the model and one request of the longest length do not fit the accelerator",
        "lower spec.engine.maxModelLen to what fits, use a quantised model or spec.engine.kvCache.dtype FP8, "
        "or a larger accelerator; kubectl quire size compares them",
        shown="FitsAccelerator=False",
    ),
    Reason(
        "ContextReduced",
        "the KV cache holds fewer tokens than the model's own context, so requests may have no more",
        "give the KV cache more memory (spec.engine.kvCache.memory, spec.resources.memory, or memoryPercent "
        "of an accelerator), or set spec.engine.maxModelLen to the context that you need",
        shown="ContextReduced=True",
    ),
    Reason(
        "ContextTooSmall",
        "the KV cache holds so few tokens that hardly any request can be answered",
        "give the KV cache more memory (spec.engine.kvCache.memory, spec.resources.memory, or memoryPercent "
        "of an accelerator), or set spec.engine.maxModelLen if so short a context is what you want",
        shown="ContextReduced=True, Stalled=True",
    ),
    Reason(
        "DrainExceedsNotice",
        "pods may run on spot nodes, and their drain takes longer than a node that is reclaimed is there, so "
        "that answers may break off without an error",
        "set spec.scheduling.spot.enabled and drop spec.drain.timeoutSeconds, which then fits, or lower it, "
        "or set spec.scheduling.spot.noticeSeconds to what your provider gives",
        shown="DrainFitsNotice=False",
    ),
    Reason(
        "FitsFewer",
        "the accelerator holds fewer requests of the longest length than spec.engine.maxNumSeqs",
        "lower spec.engine.maxModelLen or maxNumSeqs to what fits, or leave it: requests that find no room "
        "wait",
        shown="FitsAccelerator=False",
    ),
    Reason(
        "TransferDegraded",
        "decode pods compute long prompts themselves, because prefill pods do not give them their KV blocks; "
        "answers are the same, and others wait longer for their next tokens",
        "look at the prefill pods (kubectl get pods -l serving.quire.dev/role=prefill), and at the log of a "
        "decode pod, which says why each prompt was computed there",
        shown="TransferDegraded=True",
    ),
    Reason(
        "AdapterFailed",
        "an adapter of spec.adapters cannot be downloaded or loaded; the model and the other adapters serve",
        "correct the adapter's source, the Secret that it names or what the source holds, or drop it; it is "
        "tried again by itself, at the latest every five minutes",
        shown="AdaptersReady=False",
    ),
    Reason(
        "ReferenceRefused",
        "the spec names an object that does not exist or that LLMDeployments may not use",
        "have its owner label it: kubectl label KIND NAME serving.quire.dev/referable=true",
    ),
    Reason(
        "ProfileNotFound",
        "the AcceleratorProfile that a profileRef of the spec names cannot be read",
        "create it (it is found by itself then), or name one that kubectl get acceleratorprofiles shows; an "
        "operator for some namespaces only needs rbac.readAcceleratorProfiles in its chart",
    ),
    Reason(
        "MissingCRD",
        "a kind that the spec asks for is not installed in this cluster; everything else keeps working",
        "install the Gateway API (HTTPRoute), its inference extension (InferencePool) or LeaderWorkerSet "
        "v0.9 (LeaderWorkerSet), which is found by itself then, or drop spec.networking.httpRoute, "
        "inferencePool or spec.parallelism.nodes",
        shown="Routed=False, Degraded=True",
    ),
    Reason(
        "GroupIncomplete",
        "some pods of a group hold their nodes and wait for others that have none",
        "make room for the pods that the message names, or lower spec.replicas or spec.parallelism.nodes",
    ),
    Reason(
        "GroupCrashLoop",
        "a group of pods was recreated five times within ten minutes, so that each new one waits longer "
        "before it starts",
        "read the log of the ended containers of all its pods (kubectl logs --previous) and correct what the "
        "message names; it is tried again, ever more rarely",
        final=True,
    ),
    Reason(
        "RanksUnauthenticated",
        "the pods of a group do not authenticate each other, because neither field names a Secret with a key",
        "create a Secret with a random entry and name it in spec.parallelism.authSecretRef",
        shown="RanksAuthenticated=False",
    ),
    Reason(
        "TransfersUnauthenticated",
        "prefill and decode pods do not authenticate each other, because neither field names a Secret with a "
        "key",
        "create a Secret with a random entry and name it in spec.parallelism.authSecretRef",
        shown="TransfersAuthenticated=False",
    ),
    Reason(
        "MissingRights",
        "the operator has no right to a kind of object that the spec asks for; everything else keeps working",
        "add the rule that the message names to the operator's role, as the chart does with rbac.create=true "
        "(it is tried again by itself), or drop the field that asks for it",
    ),
    Reason(
        "RouteNotAccepted",
        "a Gateway does not accept the HTTPRoute",
        "correct spec.networking.httpRoute, or have the Gateway's listener allow routes of this namespace",
        shown="Routed=False",
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


def detail(reason: str, text: str) -> str:
    """The detail that `message` put into `text`; empty when `text` is not one of its messages."""
    start, end = message(reason, "\0").split("\0")
    return text[len(start) : -len(end)] if text.startswith(start) and text.endswith(end) else ""


def message(reason: str, detail: str = "") -> str:
    """What happened, the detail, and what to do."""
    entry = REASONS[reason]
    known = f" ({detail.rstrip('.')})" if detail else ""
    return f"{entry.what[0].upper()}{entry.what[1:]}{known}. {entry.remedy[0].upper()}{entry.remedy[1:]}."
