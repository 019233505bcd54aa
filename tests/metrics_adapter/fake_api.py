"""The API server as the adapter sees it, with what a test injects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from quire_metrics_adapter.errors import AdapterError, ConflictError, NotFoundError

Body = dict[str, Any]


OWNERS = {
    "replicasets": "Deployment",
    "deployments": "LLMDeployment",
    "statefulsets": "LeaderWorkerSet",
    "leaderworkersets": "LLMDeployment",
}


def owned(name: str, owner: str) -> Body:
    """The metadata of an LLMDeployment's Deployment or ReplicaSet; all have the uid `of-NAME`."""
    owners = [{"controller": True, "kind": owner, "name": name, "uid": f"of-{name}"}]
    return {"metadata": {"namespace": "team-a", "name": name, "uid": f"of-{name}", "ownerReferences": owners}}


class FakeApi:
    """Lists and watches of pods, and the two APIServices with their conditional patches."""

    def __init__(self, service: str = "quire-metrics-adapter") -> None:
        self.pods: list[Body] = []
        self.groups: tuple[str, ...] = ()  # LLMDeployments of groups of pods; none without LeaderWorkerSet
        self.watches: list[list[Body | AdapterError]] = []  # each watch takes one; the last one stays open
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.services = {
            f"{version}.custom.metrics.k8s.io": {
                "metadata": {"name": f"{version}.custom.metrics.k8s.io", "resourceVersion": "1"},
                "spec": {"service": {"namespace": "quire-system", "name": service}},
            }
            for version in ("v1beta1", "v1beta2")
        }
        self.writes: list[str] = []
        self.in_between: list[Any] = []  # called before a patch, once each: another client who is faster

    async def request(self, method: str, path: str, *, query: Any = None, body: Any = None, **_: Any) -> Body:
        self.asked.append((path, dict(query or {})))
        if (plural := path.rpartition("/")[2]) in OWNERS:
            if plural == "leaderworkersets" and not self.groups:
                raise NotFoundError("HTTP 404")
            is_group = plural in ("leaderworkersets", "statefulsets")
            named = self.groups if is_group else ("chat", "chat-prefill", "chat-other", "code")
            items = [owned(name, OWNERS[plural]) for name in named]
            for item in items if OWNERS[plural] == "LLMDeployment" else ():
                item["metadata"]["ownerReferences"][0]["name"] = item["metadata"]["name"].partition("-")[0]
            return {"metadata": {}, "items": items}
        if path == "/api/v1/pods":
            return {"metadata": {"resourceVersion": "10"}, "items": list(self.pods)}
        service = self.services[path.rpartition("/")[2]]
        if method == "PATCH":
            if self.in_between:
                self.in_between.pop()(service)
            if body["metadata"]["resourceVersion"] != service["metadata"]["resourceVersion"]:
                raise ConflictError("changed")
            self.change(service, body["spec"]["caBundle"])
            self.writes.append(service["metadata"]["name"])
        return {"metadata": dict(service["metadata"]), "spec": dict(service["spec"])}

    @staticmethod
    def change(service: Body, bundle: str) -> None:
        service["spec"]["caBundle"] = bundle
        version = int(service["metadata"]["resourceVersion"]) + 1
        service["metadata"]["resourceVersion"] = str(version)

    async def watch(self, path: str, query: dict[str, str]) -> AsyncIterator[Body]:
        self.asked.append((f"watch {path}", dict(query)))
        events = self.watches.pop(0) if self.watches else []
        for event in events:
            if isinstance(event, AdapterError):
                raise event
            yield event
        if not self.watches:
            await asyncio.Event().wait()
