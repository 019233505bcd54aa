"""Story: every command of docs/operations.md, in order, from installation to removal."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.kubectl import Kubectl
from e2e.stories.conftest import ROOT
from e2e.stories.deployment import LLMDeployment
from e2e.stories.release import NAMESPACE, RELEASE, OperatorRelease
from e2e.stories.test_10_readme import readme_blocks
from e2e.up.place import MODEL, Place

pytestmark = pytest.mark.alone  # the operator is uninstalled

PAGE = ROOT / "docs" / "operations.md"


def page_commands() -> list[str]:
    """Every code block without a language, in the page's order: those are shell commands."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [block for language, block in found if not language]


def delete_page_objects(kube: Kubectl) -> None:
    """Deletes what the page creates, also when an earlier run stopped half-way."""
    LLMDeployment(kube, "default", "my-model").remove()
    kube.delete("secret", "keys", "default")


@pytest.fixture
def checkout(place: Place, operator: OperatorRelease, kube: Kubectl, tmp_path: Path) -> Iterator[Path]:
    """A directory with what a clone has, beside a cluster from which Quire was uninstalled."""
    values = operator.values()
    example = LLMDeployment(kube, "default", "smollm2").read()
    for name in ("charts", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / MODEL).parent.mkdir(parents=True)
    (tmp_path / MODEL).symlink_to(place.model)
    (tmp_path / "values.yaml").write_text(values)
    (manifest,) = readme_blocks("yaml")
    # Small requests, so that two replicas and a surge pod fit on a small node.
    (tmp_path / "my-model.yaml").write_text(manifest.replace('cpu: "1"', "cpu: 100m"))
    delete_page_objects(kube)
    kube.helm("uninstall", RELEASE, "-n", NAMESPACE, "--wait", "--timeout=120s")
    kube.run("delete", "namespace", NAMESPACE, "--timeout=120s")
    yield tmp_path
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}})
    operator.install(values)
    metadata = {key: example["metadata"][key] for key in ("name", "namespace")}
    delete_page_objects(kube)
    kube.apply({**{key: example[key] for key in ("apiVersion", "kind", "spec")}, "metadata": metadata})
    LLMDeployment(kube, "default", "smollm2").wait_ready()  # the next story counts the operator's writes


@pytest.mark.deep
def test_every_command_of_the_operations_page_does_what_the_page_says(checkout: Path, kube: Kubectl) -> None:
    path = f"{kube.bin}:{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "KUBECONFIG": str(kube.kubeconfig)}
    for block in page_commands():
        script = f"set -euo pipefail\n{block}"
        done = subprocess.run(
            ["bash", "-c", script], cwd=checkout, env=environment, capture_output=True, text=True, timeout=420
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
