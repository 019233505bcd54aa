"""The installed operator: its Helm release in `quire-system`, its pods, and a record of its writes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from e2e.kubectl import Kubectl
from e2e.stories.waiting import eventually
from e2e.stories.write_record import WriteRecord

NAMESPACE = "quire-system"
RELEASE = "quire"
DEPLOYMENT = "quire-operator"
USER = f"system:serviceaccount:{NAMESPACE}:{DEPLOYMENT}"
MANAGER = DEPLOYMENT  # field manager of what the operator applies


@dataclass(frozen=True)
class OperatorRelease:
    """The Helm release, and the record of what its ServiceAccount wrote."""

    kube: Kubectl
    root: Path
    write_record: WriteRecord

    def values(self) -> str:
        """The values that the release was installed with, as YAML."""
        return self.kube.helm("get", "values", RELEASE, "-n", NAMESPACE, "-o", "yaml")

    def engine_image(self) -> str:
        """The image of the serving pods."""
        image = json.loads(self.kube.helm("get", "values", RELEASE, "-n", NAMESPACE, "-o", "json"))[
            "engineImage"
        ]
        return f"{image['repository']}:{image['tag']}"

    def upgrade(self, *args: str) -> None:
        """Upgrades the release with its present values plus `args`; returns when a pod is the leader."""
        self._deploy("--reuse-values", *args)

    def install(self, values: str) -> None:
        """Installs the release with `values` (YAML); returns when one of its pods is the leader."""
        self._deploy("--values=-", stdin=values)

    def _deploy(self, *args: str, stdin: str | None = None) -> None:
        chart = str(self.root / "charts" / "quire")
        self.kube.helm(
            "upgrade",
            "--install",
            RELEASE,
            chart,
            "-n",
            NAMESPACE,
            *args,
            "--wait",
            "--timeout=180s",
            stdin=stdin,
        )
        eventually("an operator pod leads", lambda: self.leader() in self.pods())

    def pods(self) -> list[str]:
        pods = self.kube.list("pods", NAMESPACE, f"app.kubernetes.io/name={DEPLOYMENT}")
        return sorted(p["metadata"]["name"] for p in pods if "deletionTimestamp" not in p["metadata"])

    def leader(self) -> str:
        lease = self.kube.get("leases", DEPLOYMENT, NAMESPACE)
        return str((lease or {}).get("spec", {}).get("holderIdentity") or "")

    def restart(self) -> None:
        """Deletes every operator pod and returns when a new one is the leader."""
        old = self.pods()
        self.kube.run("delete", "pods", "-n", NAMESPACE, *old, "--wait=true", "--timeout=60s")
        eventually("a new operator pod leads", lambda: self.leader() in self.pods())
