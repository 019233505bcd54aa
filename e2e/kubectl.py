"""kubectl and helm with one kubeconfig: how `make up` and the stories reach a cluster, as a user would.

Knows nothing of Quire.
"""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Manifest = dict[str, Any]


class KubectlError(Exception):
    """kubectl or helm ended with an error; the message is what it printed."""


@dataclass(frozen=True)
class Kubectl:
    """One cluster, and the programs with which it is reached."""

    bin: Path
    kubeconfig: Path

    def argv(self, *args: str) -> list[str]:
        """The command line of one kubectl call."""
        return [str(self.bin / "kubectl"), f"--kubeconfig={self.kubeconfig}", *args]

    def run(self, *args: str, stdin: str | None = None) -> str:
        """Runs kubectl and returns its standard output; raises KubectlError with its words."""
        return _run(self.argv(*args), stdin)

    def helm(self, *args: str, stdin: str | None = None) -> str:
        """Runs helm, likewise."""
        return _run(self.helm_argv(*args), stdin)

    def helm_argv(self, *args: str) -> list[str]:
        """The command line of one helm call."""
        return [str(self.bin / "helm"), f"--kubeconfig={self.kubeconfig}", *args]

    def apply(self, *manifests: Manifest) -> None:
        """Applies manifests."""
        self.run("apply", "-f", "-", stdin="\n---\n".join(json.dumps(manifest) for manifest in manifests))

    def get(self, kind: str, name: str, namespace: str) -> Manifest | None:
        """One object, or None."""
        found = self.run("get", kind, name, "-n", namespace, "-o", "json", "--ignore-not-found")
        return json.loads(found) if found.strip() else None

    def list(self, kind: str, namespace: str, selector: str = "") -> list[Manifest]:
        """The objects of a kind, where given those with labels."""
        found = self.run("get", kind, "-n", namespace, "-o", "json", f"--selector={selector}")
        items: list[Manifest] = json.loads(found)["items"]
        return items

    def patch(self, kind: str, name: str, namespace: str, patch: Manifest) -> None:
        """One merge patch."""
        self.run("patch", kind, name, "-n", namespace, "--type=merge", f"--patch={json.dumps(patch)}")

    def delete(self, kind: str, name: str, namespace: str, *flags: str) -> None:
        """Deletes one object if it is there, and waits unless a flag says otherwise."""
        self.run("delete", kind, name, "-n", namespace, "--ignore-not-found", *flags)


def _run(argv: list[str], stdin: str | None) -> str:
    done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=900)
    if done.returncode != 0:
        said = done.stderr.strip() or done.stdout.strip()
        raise KubectlError(f"{Path(argv[0]).name} {' '.join(argv[2:])}: {said}")
    return done.stdout
