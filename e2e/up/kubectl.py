"""kubectl and helm with the cluster's kubeconfig: the only way in which `make up` talks to a cluster."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.up.errors import UpError

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Kubectl:
    """One cluster, and the programs with which it is reached."""

    bin: Path
    kubeconfig: Path

    def argv(self, *args: str) -> list[str]:
        """The command line of one kubectl call."""
        return [str(self.bin / "kubectl"), f"--kubeconfig={self.kubeconfig}", *args]

    def run(self, *args: str, stdin: str | None = None) -> str:
        """Runs kubectl; its words become the error's."""
        return _run(self.argv(*args), stdin)

    def helm(self, *args: str) -> str:
        """Runs helm."""
        return _run([str(self.bin / "helm"), f"--kubeconfig={self.kubeconfig}", *args], None)

    def apply(self, *manifests: Manifest) -> None:
        """Applies manifests."""
        self.run("apply", "-f", "-", stdin="\n---\n".join(json.dumps(manifest) for manifest in manifests))

    def get(self, kind: str, name: str, namespace: str) -> Manifest | None:
        """One object, or None."""
        found = self.run("get", kind, name, "-n", namespace, "-o", "json", "--ignore-not-found")
        return json.loads(found) if found.strip() else None


def _run(argv: list[str], stdin: str | None) -> str:
    done = subprocess.run(argv, input=stdin, capture_output=True, text=True)
    if done.returncode != 0:
        raise UpError(f"{Path(argv[0]).name} {' '.join(argv[2:])}: {done.stderr.strip()}")
    return done.stdout
