"""An API server with an audit log of all writes and the chart's RBAC, for the operator's tests and
benchmark.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from e2e.api import profiles
from e2e.api.client import Client
from e2e.api.specs import CRD, Body
from e2e.cluster.apiserver import ApiServer
from e2e.operator import rights
from e2e.operator.world import OPERATOR_NAMESPACE, World

GATEWAY = (
    "--set",
    "gateway.enabled=true,gateway.namespaces={default},gateway.image.repository=registry.example/gateway",
)
POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata", "verbs": ["create", "update", "patch", "delete", "deletecollection"]}],
}


@contextmanager
def audited(crd: Body = CRD) -> Iterator[tuple[ApiServer, World]]:
    """An API server with our CRDs, a profile and the operator's account, and an administrator's client.
    `crd`: that of LLMDeployments.
    """
    with tempfile.TemporaryDirectory(prefix="quire-audit-") as name:
        directory = Path(name)
        (directory / "policy.json").write_text(json.dumps(POLICY), encoding="utf-8")
        extra = (
            f"--audit-policy-file={directory}/policy.json",
            f"--audit-log-path={directory}/audit.log",
            "--audit-log-mode=blocking",
        )
        with ApiServer(extra=extra) as server, Client(server.kubeconfig) as client:
            client.install_crd(crd)
            client.install_crd(profiles.CRD)
            client.create(profiles.FULL)
            world = World(client, directory / "audit.log")
            world.namespace(OPERATOR_NAMESPACE)
            rights.install(world, rights.rendered_chart(*GATEWAY))
            yield server, world


@dataclass(frozen=True)
class Write:
    """One successful write. `at`: seconds since 1970 at which it was answered; `seconds`: its duration."""

    user: str
    verb: str
    resource: str  # with its subresource: llmdeployments/status
    namespace: str
    name: str
    at: float
    seconds: float


def writes(world: World, since: float = 0.0) -> list[Write]:
    """All writes in the audit log that were answered at `since` or later."""
    lines = world.audit_log.read_text(encoding="utf-8").splitlines()
    found = [_read(json.loads(line)) for line in lines]
    return [write for write in found if write is not None and write.at >= since]


def _read(event: dict[str, Any]) -> Write | None:
    if event["stage"] != "ResponseComplete" or event["responseStatus"]["code"] >= 300:
        return None
    thing = event.get("objectRef") or {}
    asked, answered = (
        datetime.fromisoformat(event[key]).timestamp()
        for key in ("requestReceivedTimestamp", "stageTimestamp")
    )
    return Write(
        user=str(event["user"]["username"]),
        verb=str(event["verb"]),
        resource="/".join(filter(None, (thing.get("resource"), thing.get("subresource")))),
        namespace=str(thing.get("namespace", "")),
        name=str(thing.get("name", "")),
        at=answered,
        seconds=answered - asked,
    )
