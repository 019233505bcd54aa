"""`kubectl quire` after `make up`: found on README's PATH, and it runs."""

import os
import subprocess
from pathlib import Path

from e2e.cluster import Checkout
from e2e.up import plugin

ROOT = Path(__file__).parents[2]


def test_the_plugin_is_installed_beside_kubectl_and_runs_from_any_directory(tmp_path: Path) -> None:
    checkout = Checkout.at(tmp_path)
    plugin.install(checkout)
    (tmp_path / "operator").symlink_to(ROOT / "operator")

    done = subprocess.run(
        [str(checkout.bin / "kubectl-quire"), "--help"],
        cwd="/",
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    assert "size" in done.stdout
