"""What the stories know of a cluster: kubectl, as a user has it, and one way to wait.

Every story goes through this module, so that it does what a user would do and prints what a user would see.
It knows nothing of LLMDeployments; `deployment.py` does.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
Manifest = dict[str, Any]


def eventually(what: str, probe: Callable[[], T | None], *, timeout: float = 60.0, poll: float = 0.2) -> T:
    """Returns the first truthy answer of `probe`; after `timeout` seconds fails with `what`."""
    deadline = time.monotonic() + timeout
    while True:
        answer = probe()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:.0f} s: {what} (last answer: {answer!r})")
        time.sleep(poll)


class KubectlError(AssertionError):
    """kubectl ended with an error; the message is what it printed."""


@dataclass(frozen=True)
class Kube:
    """One cluster, seen through kubectl with one kubeconfig."""

    kubeconfig: Path
    program: Path

    def run(self, *args: str, stdin: str | None = None, timeout: float = 120.0) -> str:
        """Runs kubectl and returns its standard output; raises KubectlError with its words."""
        command = [str(self.program), f"--kubeconfig={self.kubeconfig}", *args]
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=timeout, check=False
        )
        if done.returncode != 0:
            raise KubectlError(f"kubectl {' '.join(args)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def apply(self, *manifests: Manifest) -> None:
        self.run("apply", "-f", "-", stdin="\n---\n".join(json.dumps(m) for m in manifests))

    def get(self, kind: str, name: str, namespace: str) -> Manifest | None:
        out = self.run("get", kind, name, "-n", namespace, "-o", "json", "--ignore-not-found")
        return json.loads(out) if out.strip() else None

    def list(self, kind: str, namespace: str, selector: str = "") -> list[Manifest]:
        out = self.run(
            "get", kind, "-n", namespace, "-o", "json", *([f"--selector={selector}"] if selector else [])
        )
        items: list[Manifest] = json.loads(out)["items"]
        return items

    def patch(self, kind: str, name: str, namespace: str, patch: Manifest) -> None:
        self.run("patch", kind, name, "-n", namespace, "--type=merge", f"--patch={json.dumps(patch)}")

    def delete(self, kind: str, name: str, namespace: str, *extra: str) -> None:
        self.run("delete", kind, name, "-n", namespace, "--ignore-not-found", *extra)
