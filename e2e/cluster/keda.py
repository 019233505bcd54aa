"""KEDA's CRD of ScaledObjects, from the Go module of the oldest release that Quire takes.

For tests of what the API server makes of our ScaledObjects. KEDA itself does not run there: its operator is
3,300 Go packages, the clients of every cloud among them, and was not built after 15 minutes on two cores.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import yaml

from e2e.cluster.errors import BuildError

MODULE = "github.com/kedacore/keda/v2@v2.17.3"
SHA256 = "e0975e421cc9ff171ffd374057afd1507d9355cf6de590844a843ab4ae664416"


def crd() -> dict[str, Any]:
    """The CRD of scaledobjects.keda.sh."""
    done = subprocess.run(
        ["go", "mod", "download", "-json", MODULE], capture_output=True, text=True, cwd="/", timeout=120
    )
    if done.returncode != 0:
        raise BuildError(f"{MODULE}: {done.stdout}{done.stderr}")
    path = Path(json.loads(done.stdout)["Dir"]) / "config" / "crd" / "bases" / "keda.sh_scaledobjects.yaml"
    text = path.read_bytes()
    if hashlib.sha256(text).hexdigest() != SHA256:
        raise BuildError(f"{path} is not what it was: compare it with the release, then change SHA256")
    found: dict[str, Any] = yaml.safe_load(text)
    return found
