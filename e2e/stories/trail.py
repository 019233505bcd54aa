"""What the operator wrote, as far as a cluster lets its administrator see it.

The audit log of our own cluster has every request. Of another cluster's there is only what each object says
about its writers: a write that changed nothing, or deleted something, leaves no trace there. `release` hands
one of the two to the stories.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from e2e.kubectl import Kubectl, Manifest

_WRITES = {"create", "update", "patch", "delete", "deletecollection"}


class Trail(Protocol):
    """Where writes are seen."""

    def writes(self) -> Counter[str]:
        """The operator's writes so far, each as `resource[/subresource] namespace/name` and more."""


@dataclass(frozen=True)
class AuditLog:
    """The API server's own record: complete, and on the disk of the machine that it runs on."""

    path: Path
    user: str

    def writes(self) -> Counter[str]:
        counted: Counter[str] = Counter()
        with self.path.open() as log:
            for line in log:
                event = json.loads(line)
                if event["stage"] != "ResponseComplete" or event["user"]["username"] != self.user:
                    continue
                if event["verb"] in _WRITES:
                    thing = event.get("objectRef", {})
                    resource = "/".join(filter(None, (thing.get("resource"), thing.get("subresource"))))
                    counted[f"{resource} {thing.get('namespace')}/{thing.get('name')} {event['verb']}"] += 1
        return counted


@dataclass(frozen=True)
class ManagedFields:
    """The last change that each object of the cluster has from a manager, with its second."""

    kube: Kubectl
    manager: str

    def writes(self) -> Counter[str]:
        listed = self.kube.run("api-resources", "--verbs=list,patch", "--no-headers")
        # NAME [SHORTNAMES] APIVERSION NAMESPACED KIND
        rows = [line.split() for line in listed.splitlines()]
        resources = {(row[-3], row[-1]): row[0] for row in rows}
        names = [_qualified(row[0], row[-3]) for row in rows]
        found = self.kube.run("get", ",".join(names), "-A", "-o", "json", "--show-managed-fields")
        return Counter(
            f"{'/'.join(filter(None, (resources[_kind(item)], entry.get('subresource'))))} "
            f"{item['metadata'].get('namespace')}/{item['metadata']['name']} {entry.get('time')}"
            for item, entry in _entries(json.loads(found)["items"])
            if entry["manager"] == self.manager
        )


def _entries(items: list[Manifest]) -> Iterator[tuple[Manifest, Manifest]]:
    for item in items:
        for entry in item["metadata"].get("managedFields") or []:
            yield item, entry


def _kind(item: Manifest) -> tuple[str, str]:
    return item["apiVersion"], item["kind"]


def _qualified(resource: str, api_version: str) -> str:
    """As kubectl takes it: without the group, the first that has the name would win."""
    group = api_version.rpartition("/")[0]
    return f"{resource}.{group}" if group else resource
