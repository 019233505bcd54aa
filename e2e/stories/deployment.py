"""An LLMDeployment in a story: apply it, wait for its conditions, send requests, read the objects it owns.

The stories use the names of the API's fields through this module only.
"""

from __future__ import annotations

import contextlib
import copy
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from openai import OpenAI

from e2e.failure_paths import recorder
from e2e.kubectl import Kubectl, KubectlError, Manifest
from e2e.stories.waiting import eventually
from quire_server.fault_injection import INJECTED

NAME_LABEL = "serving.quire.dev/name"
SERVED_NAME = "smollm2-135m-instruct"
CHILDREN = (
    "deployments",
    "services",
    "serviceaccounts",
    "configmaps",
    "poddisruptionbudgets",
    "networkpolicies",
)


@dataclass(frozen=True)
class LLMDeployment:
    """One named LLMDeployment in one namespace."""

    kube: Kubectl
    namespace: str
    name: str

    def apply(self, spec: Manifest) -> None:
        self.kube.apply(
            {
                "apiVersion": "serving.quire.dev/v1alpha1",
                "kind": "LLMDeployment",
                "metadata": {"name": self.name, "namespace": self.namespace},
                "spec": spec,
            }
        )

    def patch(self, spec: Manifest) -> None:
        self.kube.patch("llmdeployment", self.name, self.namespace, {"spec": spec})

    def remove(self) -> None:
        """Deletes it and its pods without a drain (`--now`), and does not wait until they are gone."""
        self.kube.delete("llmdeployment", self.name, self.namespace)
        # The owners are deleted first, since a ReplicaSet would replace its pods.
        kinds, selector = "deployment,replicaset,pod", f"--selector={NAME_LABEL}={self.name}"
        self.kube.run("delete", kinds, "-n", self.namespace, selector, "--now", "--wait=false")

    def read(self) -> Manifest:
        body = self.kube.get("llmdeployments", self.name, self.namespace)
        assert body is not None, f"LLMDeployment {self.namespace}/{self.name} is gone"
        return body

    def status(self) -> Manifest:
        status: Manifest = self.read().get("status", {})
        recorder.record_status(status)
        return status

    def condition(self, kind: str) -> Manifest:
        found = [c for c in self.status().get("conditions", []) if c["type"] == kind]
        return found[0] if found else {"status": "Unknown", "reason": "", "message": ""}

    def wait_ready(self, timeout: int = 240) -> None:
        """Waits for Ready, then for the Service; a timeout fails and shows the status and the pods."""
        try:
            self.kube.run(
                "wait", "llmdeployment", self.name, "-n", self.namespace,
                "--for=condition=Ready", f"--timeout={timeout}s",
            )  # fmt: skip
        except KubectlError as error:
            raise AssertionError(f"{error}\nstatus: {self.status()}\npods: {self.describe_pods()}") from error
        self.wait_routed()

    def wait_routed(self) -> None:
        """Waits for kube-proxy, which routes to a pod a moment after the pod became ready."""
        address = urlsplit(self.base_url)

        def accepts() -> bool:
            try:
                socket.create_connection((address.hostname, address.port), timeout=5).close()
            except OSError:
                return False
            return True

        eventually("the Service accepts connections", accepts)

    def wait_settled(self, timeout: float = 240) -> Manifest:
        """Waits until the newest generation is observed, Ready and not reconciling; returns the status."""

        def settled() -> Manifest | None:
            body = self.read()
            status = body.get("status", {})
            conditions = {c["type"]: c["status"] for c in status.get("conditions", [])}
            seen = status.get("observedGeneration") == body["metadata"]["generation"]
            return (
                status
                if seen and conditions.get("Ready") == "True" and conditions.get("Reconciling") != "True"
                else None
            )

        status = eventually(f"{self.name} settled, Ready", settled, timeout=timeout)
        self.wait_routed()
        return status

    def wait_failure(self, reason: str, timeout: float = 240) -> Manifest:
        """Waits for `status.lastFailure.reason == reason`."""

        def failed() -> Manifest | None:
            failure: Manifest = self.status().get("lastFailure", {})
            return failure if failure.get("reason") == reason else None

        return eventually(f"{self.name} reports lastFailure {reason}", failed, timeout=timeout, poll=0.5)

    def wait_reason(self, condition: str, reason: str, timeout: float = 240) -> Manifest:
        """Waits until `condition` has `reason`; returns the condition."""

        def found_reason() -> Manifest | None:
            found = self.condition(condition)
            return found if found["reason"] == reason else None

        return eventually(
            f"{self.name} condition {condition} has reason {reason}", found_reason, timeout=timeout, poll=0.5
        )

    def wait_fault(self, name: str, timeout: float = 240) -> None:
        """Waits until an injected fault took effect, by the log of a server."""
        eventually(
            f"{name} took effect in {self.name}", lambda: name in self._faults(), timeout=timeout, poll=1.0
        )
        recorder.record("fault", name)

    def _faults(self) -> set[str]:
        lines = [line for pod in self.pods() for line in self._log_lines(pod) if INJECTED in line]
        return {str(json.loads(line)["fault"]) for line in lines}

    def _log_lines(self, pod: Manifest) -> list[str]:
        """Of its running container, and of the one before it, where there are such."""
        lines: list[str] = []
        for which in ("--previous=false", "--previous=true"):
            with contextlib.suppress(KubectlError):
                name = pod["metadata"]["name"]
                lines += self.kube.run("logs", "-n", self.namespace, name, which, "--tail=-1").splitlines()
        return lines

    def pods(self) -> list[Manifest]:
        """Its pods that are not being deleted."""
        pods = self.kube.list("pods", self.namespace, f"{NAME_LABEL}={self.name}")
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]

    def ready_pods(self) -> list[Manifest]:
        return [pod for pod in self.pods() if is_ready(pod)]

    def describe_pods(self) -> str:
        return self.kube.run(
            "describe", "pods", "-n", self.namespace, f"--selector={NAME_LABEL}={self.name}"
        )[-6000:]

    def endpoints(self) -> set[str]:
        """Names of the pods that are ready endpoints of the Service."""
        names = set()
        for endpoint_slice in self.kube.list(
            "endpointslices", self.namespace, f"kubernetes.io/service-name={self.name}"
        ):
            for endpoint in endpoint_slice.get("endpoints") or []:
                if endpoint["conditions"].get("ready"):
                    names.add(endpoint["targetRef"]["name"])
        return names

    def events(self, reason: str) -> list[Manifest]:
        events = self.kube.list("events", self.namespace)
        about = [event for event in events if event.get("regarding", {}).get("name") == self.name]
        found = [event for event in about if event.get("reason") == reason]
        if found:
            recorder.record("event", reason)
        return found

    @property
    def base_url(self) -> str:
        service = self.kube.get("services", self.name, self.namespace)
        assert service is not None, "the Service is missing"
        return f"http://{service['spec']['clusterIP']}:{service['spec']['ports'][0]['port']}/v1"

    @contextlib.contextmanager
    def client(self, api_key: str = "none", base_url: str | None = None) -> Iterator[OpenAI]:
        with OpenAI(
            base_url=base_url or self.base_url, api_key=api_key, max_retries=0, timeout=120
        ) as client:
            yield client


def is_ready(pod: Manifest) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def small_spec(**changes: Any) -> Manifest:
    """A spec of small pods, so that several fit on two cores; `changes` replace top-level fields."""
    spec: Manifest = {
        "model": {"source": {"pvc": {"claimName": "smollm2"}}, "servedName": SERVED_NAME},
        "engine": {"maxModelLen": 1024, "maxNumSeqs": 8, "kvCache": {"memory": "128Mi"}},
        "resources": {"cpu": "100m", "memory": "2Gi"},
        "drain": {"preStopSeconds": 3, "timeoutSeconds": 60},
    }
    return {**copy.deepcopy(spec), **changes}
