"""Story 0: a newcomer copies what the README shows, and nothing else, and gets an answer."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.kubectl import Kubectl
from e2e.stories.conftest import ROOT


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


@pytest.fixture
def newcomer(kube: Kubectl, tmp_path: Path) -> Iterator[Path]:
    """A directory that looks like the checkout after `make up` and holds the manifest from the README."""
    (tmp_path / ".cluster").mkdir()
    (tmp_path / ".cluster" / "bin").symlink_to(kube.bin)
    (tmp_path / ".cluster" / "kubeconfig").symlink_to(kube.kubeconfig)
    (manifest,) = blocks("yaml")
    (tmp_path / "my-model.yaml").write_text(manifest)
    yield tmp_path
    kube.delete("llmdeployment", "my-model", "default")


def test_the_commands_of_the_readme_end_with_paris(newcomer: Path) -> None:
    (commands,) = blocks("bash")
    script = f"set -euo pipefail\n{commands}\nkill %1\n"

    done = subprocess.run(["bash", "-c", script], cwd=newcomer, capture_output=True, text=True, timeout=300)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "Paris" in done.stdout
