"""A client of the API server with an administrator's rights, and writes that stand in for controllers and
kubelet.

Knows nothing of the operator's process.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from e2e.api.client import Client, RefusedError
from e2e.failure_paths import recorder
from e2e.waiting import eventually

Body = dict[str, Any]

OPERATOR_NAMESPACE = "quire-system"
NAME_LABEL = "serving.quire.dev/name"
MERGE = "application/merge-patch+json"

PATHS = {
    "LLMDeployment": "/apis/serving.quire.dev/v1alpha1/namespaces/{}/llmdeployments",
    "ControllerRevision": "/apis/apps/v1/namespaces/{}/controllerrevisions",
    "Deployment": "/apis/apps/v1/namespaces/{}/deployments",
    "ReplicaSet": "/apis/apps/v1/namespaces/{}/replicasets",
    "Pod": "/api/v1/namespaces/{}/pods",
    "Service": "/api/v1/namespaces/{}/services",
    "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "PodDisruptionBudget": "/apis/policy/v1/namespaces/{}/poddisruptionbudgets",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    "HorizontalPodAutoscaler": "/apis/autoscaling/v2/namespaces/{}/horizontalpodautoscalers",
    "HTTPRoute": "/apis/gateway.networking.k8s.io/v1/namespaces/{}/httproutes",
    "InferencePool": "/apis/inference.networking.k8s.io/v1/namespaces/{}/inferencepools",
    "ScaledObject": "/apis/keda.sh/v1alpha1/namespaces/{}/scaledobjects",
    "LeaderWorkerSet": "/apis/leaderworkerset.x-k8s.io/v1/namespaces/{}/leaderworkersets",
    "StatefulSet": "/apis/apps/v1/namespaces/{}/statefulsets",
    "Job": "/apis/batch/v1/namespaces/{}/jobs",
    "PersistentVolumeClaim": "/api/v1/namespaces/{}/persistentvolumeclaims",
    "Lease": "/apis/coordination.k8s.io/v1/namespaces/{}/leases",
    "Event": "/apis/events.k8s.io/v1/namespaces/{}/events",
}
_CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
# The PodDisruptionBudget follows the first pod.
CHILDREN = ("ServiceAccount", "ConfigMap", "NetworkPolicy", "Service", "Deployment")
BUDGET = "PodDisruptionBudget"


@dataclass(frozen=True)
class World:
    """One API server, with the rights of an administrator."""

    client: Client
    audit_log: Path

    def get(self, kind: str, namespace: str, name: str) -> Body | None:
        try:
            return self.client.request("GET", f"{PATHS[kind].format(namespace)}/{name}")
        except RefusedError as error:
            assert "not found" in str(error), error
            return None

    def read(self, kind: str, namespace: str, name: str) -> Body:
        body = self.get(kind, namespace, name)
        assert body is not None, f"{kind} {namespace}/{name} is not there"
        return body

    def find(self, kind: str, namespace: str, selector: str = "") -> list[Body]:
        answer = self.client.request("GET", f"{PATHS[kind].format(namespace)}?labelSelector={selector}")
        items: list[Body] = answer["items"]
        return items

    def create(self, kind: str, namespace: str, body: Body) -> Body:
        return self.client.request("POST", PATHS[kind].format(namespace), body)

    def patch(self, kind: str, namespace: str, name: str, patch: Body, *, status: bool = False) -> Body:
        path = f"{PATHS[kind].format(namespace)}/{name}{'/status' if status else ''}"
        return self.client.request("PATCH", path, patch, MERGE)

    def delete(self, kind: str, namespace: str, name: str) -> None:
        options = {"gracePeriodSeconds": 0, "propagationPolicy": "Background"}
        self.client.request("DELETE", f"{PATHS[kind].format(namespace)}/{name}", options)

    def history(self, kind: str, namespace: str, since: Body) -> list[Body]:
        """Every state of the objects of `kind` after `since` (an object or a list), as a watch reports
        them.
        """
        version = since["metadata"]["resourceVersion"]
        path = f"{PATHS[kind].format(namespace)}?watch=true&timeoutSeconds=1&resourceVersion={version}"
        return [event["object"] for event in self.client.lines(path)]

    def scale(self, namespace: str, name: str, replicas: int, *, kind: str = "Deployment") -> None:
        """As the HorizontalPodAutoscaler controller does it, which waits for its target to be there."""
        path = f"{PATHS[kind].format(namespace)}/{name}/scale"
        eventually(f"{kind} {name}", lambda: self.get(kind, namespace, name))
        while True:
            scale = self.client.request("GET", path)
            scale["spec"]["replicas"] = replicas
            try:
                self.client.request("PUT", f"{path}?fieldManager=kube-controller-manager", scale)
            except RefusedError as error:
                assert "has been modified" in str(error), error
            else:
                return

    def uninstall(self, kind: str) -> None:
        """Delete the CRD of `kind`, and wait until its API is gone."""
        path = PATHS[kind].replace("/namespaces/{}", "")
        plural, group = path.rpartition("/")[2], path.split("/")[2]
        self.client.request("DELETE", f"{_CRDS}/{plural}.{group}", {})

        def gone() -> bool:
            try:
                self.client.request("GET", path)
            except RefusedError:
                return True
            return False

        eventually(f"the API of {kind} is gone", gone)

    def namespace(self, name: str) -> str:
        self.client.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        return name

    def deploy(self, namespace: str, name: str, **spec: Any) -> Body:
        """A minimal LLMDeployment, with `spec` merged over it."""
        least = {
            "model": {"source": {"pvc": {"claimName": "models"}}},
            "resources": {"cpu": "1", "memory": "2Gi"},
        }
        return self.create(
            "LLMDeployment",
            namespace,
            {
                "apiVersion": "serving.quire.dev/v1alpha1",
                "kind": "LLMDeployment",
                "metadata": {"name": name, "namespace": namespace},
                "spec": {**least, **spec},
            },
        )

    def child(self, kind: str, namespace: str, name: str) -> Body | None:
        """The newest child of `kind` (ConfigMaps have a hash in their name)."""
        found = self.find(kind, namespace, f"{NAME_LABEL}={name}")
        return max(found, key=lambda body: str(body["metadata"]["creationTimestamp"])) if found else None

    def has_children(self, namespace: str, name: str) -> bool:
        """Whether all are there; the budget belongs to them as soon as the Deployment has a pod."""
        pods = self.find("Pod", namespace, f"{NAME_LABEL}={name}")
        owners = {each["kind"] for pod in pods for each in pod["metadata"].get("ownerReferences", ())}
        kinds = (*CHILDREN, BUDGET) if "ReplicaSet" in owners else CHILDREN
        return all(self.child(kind, namespace, name) for kind in kinds)

    def status(self, namespace: str, name: str) -> Body:
        status: Body = self.read("LLMDeployment", namespace, name).get("status", {})
        recorder.record_status(status)
        return status

    def condition(self, namespace: str, name: str, kind: str) -> Body:
        found = [c for c in self.status(namespace, name).get("conditions", []) if c["type"] == kind]
        return found[0] if found else {"status": "", "reason": "", "message": ""}

    def wait_condition(self, namespace: str, name: str, kind: str, status: str, reason: str = "") -> Body:
        def holds() -> Body | None:
            found = self.condition(namespace, name, kind)
            return found if found["status"] == status and reason in ("", found["reason"]) else None

        return eventually(f"{namespace}/{name} {kind}={status} {reason}", holds)

    def wait_engine(self, namespace: str, name: str, **values: Any) -> None:
        """Waits until status.engine has these values."""
        eventually(
            f"{namespace}/{name} serves with {values}",
            lambda: values.items() <= self.status(namespace, name).get("engine", {}).items(),
        )

    def events(self, namespace: str, name: str) -> list[Body]:
        """Events about the LLMDeployment; the API server itself creates some about Services."""
        about = {"kind": "LLMDeployment", "name": name}
        found = self.find("Event", namespace)
        events = [event for event in found if about.items() <= event.get("regarding", {}).items()]
        for event in events:
            recorder.record("event", event["reason"])
        return events

    def wait_event(self, namespace: str, name: str, reason: str) -> None:
        """Waits until one of its Events has this reason."""
        eventually(
            f"an Event {reason} of {namespace}/{name}",
            lambda: reason in {event["reason"] for event in self.events(namespace, name)},
        )

    def wait_events(self, namespace: str, name: str, *reasons: str) -> list[Body]:
        """Its Events, once they are exactly these; each is recorded after the status that it describes."""

        found: list[Body] = []

        def reported() -> bool:
            found[:] = self.events(namespace, name)
            return sorted(event["reason"] for event in found) == sorted(reasons)

        try:
            eventually(f"the Events of {namespace}/{name} are {', '.join(reasons)}", reported)
        except AssertionError as error:
            notes = [f"{event['reason']}: {event.get('note')}" for event in found]
            raise AssertionError(f"{error}; there are {notes}") from None
        return found

    def lease_holder(self) -> str:
        lease = self.get("Lease", OPERATOR_NAMESPACE, "quire-operator") or {}
        return str(lease.get("spec", {}).get("holderIdentity") or "")

    def writes(self) -> Counter[str]:
        """Writes of the operator so far, from the audit log: `verb resource/subresource namespace/name`."""
        user = f"system:serviceaccount:{OPERATOR_NAMESPACE}:quire-operator"
        counted: Counter[str] = Counter()
        for line in self.audit_log.read_text(encoding="utf-8").splitlines():
            event = json.loads(line)
            if event["user"]["username"] != user or event["verb"] in ("get", "list", "watch"):
                continue
            thing = event.get("objectRef") or {}
            resource = "/".join(filter(None, (thing.get("resource"), thing.get("subresource"))))
            counted[f"{event['verb']} {resource} {thing.get('namespace')}/{thing.get('name')}"] += 1
        return counted

    # ------------------------------------------------------------ instead of controllers and kubelet

    def make_pod(self, namespace: str, name: str, status: Body, *, revision: int = 1, **spec: Any) -> Body:
        """A ReplicaSet of the Deployment and one of its pods, as the controllers would create them; `spec`:
        changes that an admission webhook has made to the template.
        """
        deployment = eventually("the Deployment", lambda: self.get("Deployment", namespace, name))
        template = deployment["spec"]["template"]
        suffix = secrets.token_hex(4)
        replica_set = self.create(
            "ReplicaSet",
            namespace,
            {
                "metadata": {
                    "name": f"{name}-{suffix}",
                    "labels": template["metadata"]["labels"],
                    "annotations": {"deployment.kubernetes.io/revision": str(revision)},
                    "ownerReferences": [_owner("apps/v1", deployment, "Deployment")],
                },
                "spec": {"selector": deployment["spec"]["selector"], "template": template},
            },
        )
        pod = self.create(
            "Pod",
            namespace,
            {
                "metadata": {
                    "name": f"{name}-{suffix}-0",
                    "labels": template["metadata"]["labels"],
                    "annotations": template["metadata"].get("annotations", {}),
                    "ownerReferences": [_owner("apps/v1", replica_set, "ReplicaSet")],
                },
                "spec": {**template["spec"], "serviceAccountName": "", **spec},
            },
        )
        return self.patch("Pod", namespace, pod["metadata"]["name"], {"status": status}, status=True)

    def make_first_pod(self, namespace: str, name: str, **spec: Any) -> None:
        """A pod that waits for a node, and the child that follows it; `spec` as for `make_pod`."""
        self.make_pod(namespace, name, {"phase": "Pending"}, **spec)
        eventually("its budget", lambda: self.has_children(namespace, name))

    def make_fetcher(self, namespace: str, job: Body, status: Body) -> Body:
        """A pod of a Job, as its controller would create it."""
        template, name = job["spec"]["template"], f"{job['metadata']['name']}-{secrets.token_hex(3)}"
        metadata = {
            "name": name,
            "labels": template["metadata"]["labels"],
            "ownerReferences": [_owner("batch/v1", job, "Job")],
        }
        spec = {**template["spec"], "serviceAccountName": ""}
        self.create("Pod", namespace, {"metadata": metadata, "spec": spec})
        return self.patch("Pod", namespace, name, {"status": status}, status=True)

    def end_job(self, namespace: str, job: Body, *, failed: str = "", ago: float = 0) -> None:
        """The status of a Job that succeeded, or that `failed` for this reason."""
        now = datetime.now(UTC) - timedelta(seconds=ago)
        moment, begun = (t.strftime("%Y-%m-%dT%H:%M:%SZ") for t in (now, now - timedelta(seconds=60)))
        kinds = ("FailureTarget", "Failed") if failed else ("SuccessCriteriaMet", "Complete")
        about = {"status": "True", "lastTransitionTime": moment, "reason": failed or "CompletionsReached"}
        conditions = [{"type": kind, **about} for kind in kinds]
        ended = {"failed": 1} if failed else {"succeeded": 1, "completionTime": moment}
        status = {"startTime": begun, "conditions": conditions, **ended}
        self.patch("Job", namespace, job["metadata"]["name"], {"status": status}, status=True)

    def roll_out(
        self,
        namespace: str,
        name: str,
        *,
        ready: int,
        replicas: int | None = None,
        updated: int | None = None,
        progressing: Body | None = None,
    ) -> None:
        """The status that the Deployment controller would write."""
        deployment = self.read("Deployment", namespace, name)
        total = ready if replicas is None else replicas
        status = {
            "observedGeneration": deployment["metadata"]["generation"],
            "replicas": total,
            "updatedReplicas": total if updated is None else updated,
            "readyReplicas": ready,
            "availableReplicas": ready,
            **({"conditions": [progressing]} if progressing else {}),
        }
        self.patch("Deployment", namespace, name, {"status": status}, status=True)


def _owner(api_version: str, body: Body, kind: str) -> Body:
    metadata = body["metadata"]
    return {
        "apiVersion": api_version,
        "kind": kind,
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
