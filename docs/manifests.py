"""Writes deploy/install.yaml: the chart with its defaults as one file, for users without Helm.

`make docs` runs it; with `--check`, which the tests use, it fails if the file is out of date.
deploy/kustomization.yaml is the base of overlays and consists of this file only.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from e2e.cluster import programs

ROOT = Path(__file__).parents[1]
BIN = ROOT / ".cluster" / "bin"
FILE = ROOT / "deploy" / "install.yaml"
NAMESPACE = "quire-system"
REGISTRY = "your-registry.example"  # a placeholder; no such registry exists
HEAD = f"""\
# Quire with the chart's defaults. Generated from charts/quire by `make docs`: edit the chart instead.
# {REGISTRY} is a placeholder: replace it by the registry of your images, in a copy of this file or as in
# examples/gitops/overlay. `make images` builds the images and pushes them to QUIRE_REGISTRY.
"""

Body = dict[str, Any]


def install() -> str:
    """The manifests of all objects, the namespace first."""
    programs.build(BIN, ("helm",))
    chart = str(ROOT / "charts" / "quire")
    command = [str(BIN / "helm"), "template", "quire", chart, "-n", NAMESPACE, "--kube-version", "1.34.0"]
    for value, name in (("image", "quire-operator"), ("engineImage", "quire-server")):
        command += ["--set", f"{value}.repository={REGISTRY}/{name}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}}
    bodies = [namespace, *(_without_helm(body) for body in yaml.safe_load_all(done.stdout) if body)]
    return HEAD + yaml.safe_dump_all(bodies, sort_keys=False, width=120)


def _without_helm(body: Body) -> Body:
    """`body` without Helm's labels and annotations: tools would take it for an object of a release."""
    metadata = body["metadata"]
    for key in ("helm.sh/chart", "app.kubernetes.io/managed-by"):
        metadata.get("labels", {}).pop(key, None)
        body.get("spec", {}).get("template", {}).get("metadata", {}).get("labels", {}).pop(key, None)
    metadata.get("annotations", {}).pop("helm.sh/resource-policy", None)
    if not metadata.get("annotations", True):
        del metadata["annotations"]
    return body


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        if FILE.exists() and FILE.read_text(encoding="utf-8") == install():
            return 0
        sys.stderr.write("deploy/install.yaml is not what the chart gives: run `make docs`\n")
        return 1
    FILE.write_text(install(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
