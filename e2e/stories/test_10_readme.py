"""Story: the commands and the manifest of the README, run as written, end with an answer."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.kubectl import Kubectl
from e2e.stories.conftest import ROOT

pytestmark = pytest.mark.alone  # the README's port may be taken


def readme_blocks(language: str) -> list[str]:
    """The code blocks of README.md in `language`."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


@pytest.fixture
def checkout(kube: Kubectl, tmp_path: Path) -> Iterator[Path]:
    """A directory with what a checkout has after `make up`, and the manifest from the README."""
    (tmp_path / ".cluster").mkdir()
    (tmp_path / ".cluster" / "bin").symlink_to(kube.bin)
    (tmp_path / ".cluster" / "kubeconfig").symlink_to(kube.kubeconfig)
    (manifest,) = readme_blocks("yaml")
    (tmp_path / "my-model.yaml").write_text(manifest)
    yield tmp_path
    kube.delete("llmdeployment", "my-model", "default")


def test_the_commands_of_the_readme_end_with_paris(checkout: Path, kube: Kubectl) -> None:
    (commands,) = readme_blocks("bash")
    script = f"set -euo pipefail\n{commands}\nkill %1\n"

    done = subprocess.run(["bash", "-c", script], cwd=checkout, capture_output=True, text=True, timeout=300)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "Paris" in done.stdout
    assert "default/my-model: Serving" in done.stdout, "kubectl finds its plugin on the PATH of the README"
    events = json.loads(kube.run("get", "events", "-n", "default", "-o", "json"))["items"]
    about = {(event["involvedObject"]["kind"], event["reason"]) for event in events}
    assert ("PodDisruptionBudget", "NoPods") not in about, "a new deployment's events warn of nothing"
