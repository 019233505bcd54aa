"""The few requests that the API tests make, with nothing between them and the wire.

A typed client would drop unknown fields and fill in defaults of its own, and both are what is being tested.
"""

from __future__ import annotations

import json
import re
import ssl
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import yaml

from e2e.api.specs import CRD, Body

_PLURALS = {
    "AcceleratorProfile": "acceleratorprofiles",
    "ConfigMap": "configmaps",
    "Deployment": "deployments",
    "Job": "jobs",
    "HTTPRoute": "httproutes",
    "HorizontalPodAutoscaler": "horizontalpodautoscalers",
    "InferencePool": "inferencepools",
    "LLMClient": "llmclients",
    "LLMDeployment": "llmdeployments",
    "LLMExternalBackend": "llmexternalbackends",
    "LLMRoute": "llmroutes",
    "LeaderWorkerSet": "leaderworkersets",
    "NetworkPolicy": "networkpolicies",
    "PersistentVolume": "persistentvolumes",
    "PersistentVolumeClaim": "persistentvolumeclaims",
    "PodDisruptionBudget": "poddisruptionbudgets",
    "Service": "services",
    "ServiceAccount": "serviceaccounts",
    "ScaledObject": "scaledobjects",
}
_CLUSTER_WIDE = {"AcceleratorProfile", "PersistentVolume"}
_TO_ESCAPE = re.compile("[^\x00-\x7e\U00010000-\U0010ffff]")


class RefusedError(Exception):
    """The API server said no; the text is its message."""


class Client:
    """A connection with the rights of the kubeconfig."""

    def __init__(self, kubeconfig: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text(encoding="utf-8"))
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        self.url, self.authority = str(cluster["server"]), Path(cluster["certificate-authority"])
        tls = ssl.create_default_context(cafile=self.authority)
        tls.load_cert_chain(user["client-certificate"], user["client-key"])
        self._http = httpx.Client(base_url=self.url, verify=tls, timeout=60, trust_env=False)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def install_crd(self, crd: Body = CRD, seconds: float = 120) -> None:
        """Create the CRD and wait until the API server serves it."""
        crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        self.request("POST", f"{crds}?fieldValidation=Strict", crd)
        spec, until = crd["spec"], time.monotonic() + seconds
        path = f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"
        while self._http.get(path).status_code != 200:
            assert time.monotonic() < until, f"{path} is not served"
            time.sleep(0.1)

    def crd(self) -> Body:
        """The CRD as it is stored, with its conditions."""
        return self.request(
            "GET", f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{CRD['metadata']['name']}"
        )

    def try_create(self, body: Body) -> Body:
        """What the object would be if it were created; nothing is stored."""
        return self.request("POST", f"{_collection(body)}?dryRun=All&fieldValidation=Strict", body)

    def create(self, body: Body) -> Body:
        """Create it."""
        return self.request("POST", f"{_collection(body)}?fieldValidation=Strict", body)

    def try_apply(self, body: Body) -> Body:
        """What the object would be after the operator's server-side apply; nothing is stored."""
        path = f"{_collection(body)}/{body['metadata']['name']}"
        query = "dryRun=All&fieldManager=quire-operator&force=true&fieldValidation=Strict"
        return self.request("PATCH", f"{path}?{query}", body, "application/apply-patch+yaml")

    def lines(self, path: str) -> list[Body]:
        """What a watch reports until it ends, one object a line."""
        return [json.loads(line) for line in self._http.get(path).raise_for_status().text.splitlines()]

    def request(
        self,
        method: str,
        path: str,
        body: Body | list[Any] | None = None,
        content_type: str = "application/json",
    ) -> Body:
        """One request; RefusedError with the server's words when it is not answered with success."""
        content = None if body is None else encode(body)
        answer = self._http.request(method, path, content=content, headers={"Content-Type": content_type})
        if not answer.is_success:
            # The aggregator's own words are plain text.
            is_json = "json" in answer.headers.get("Content-Type", "")
            raise RefusedError(answer.json().get("message", answer.text) if is_json else answer.text)
        result: Body = answer.json()
        return result

    def send(self, method: str, path: str, content: bytes = b"") -> int:
        """One request with a text of its own; the status of an answer that Python may not be able to
        decode.
        """
        return self._http.request(
            method, path, content=content, headers={"Content-Type": "application/json"}
        ).status_code


def encode(body: Body | list[Any]) -> str:
    """JSON that is YAML as well, for what is applied is read as YAML.

    YAML knows no surrogate pairs, so emoji stay as they are; control characters it wants escaped.
    """
    return _TO_ESCAPE.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(body, ensure_ascii=False))


def _collection(body: Body) -> str:
    version, kind = body["apiVersion"], body["kind"]
    base = f"/apis/{version}" if "/" in version else f"/api/{version}"
    namespace = "" if kind in _CLUSTER_WIDE else f"/namespaces/{body['metadata'].get('namespace', 'default')}"
    return f"{base}{namespace}/{_PLURALS[kind]}"
