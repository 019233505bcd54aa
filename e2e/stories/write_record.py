"""What the operator wrote to the API server.

On the cluster of `make up` the audit log has every request. On another cluster there are only the managed
fields of each object, which do not show a write that changed nothing, or a deletion.
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


class WriteRecord(Protocol):
    """A source of the operator's writes."""

    def writes(self) -> Counter[str]:
        """The operator's writes so far; each key begins `resource[/subresource] namespace/name`."""


@dataclass(frozen=True)
class AuditLog:
    """The API server's audit log: complete; a file on the machine that the API server runs on."""

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
                    target = event.get("objectRef", {})
                    resource = "/".join(filter(None, (target.get("resource"), target.get("subresource"))))
                    counted[f"{resource} {target.get('namespace')}/{target.get('name')} {event['verb']}"] += 1
        return counted


@dataclass(frozen=True)
class ManagedFields:
    """The last change of each object by one field manager, with the second of the change."""

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
    """`resource.group` for kubectl, which without the group takes the first resource of that name."""
    group = api_version.rpartition("/")[0]
    return f"{resource}.{group}" if group else resource
