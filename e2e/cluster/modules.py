"""Single files of Go modules: the manifests of other projects, as they release them.

For tests of what the API server makes of our objects of their kinds. Fetched by `go mod download`, kept in
Go's cache, and checked.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

from e2e import yaml_files
from e2e.cluster.errors import BuildError


def crd(module: str, path: str, sha256: str) -> dict[str, Any]:
    """The CRD that lies at `path` in `module@version`."""
    (found,) = load(module, path, sha256)
    return found


def load(module: str, path: str, sha256: str) -> list[dict[str, Any]]:
    """The manifests in the file at `path` in `module@version`."""
    done = subprocess.run(
        ["go", "mod", "download", "-json", module], capture_output=True, text=True, cwd="/", timeout=120
    )
    if done.returncode != 0:
        raise BuildError(f"{module}: {done.stdout}{done.stderr}")
    file = Path(json.loads(done.stdout)["Dir"]) / path
    text = file.read_bytes()
    if hashlib.sha256(text).hexdigest() != sha256:
        raise BuildError(f"{file} is not what it was: compare it with the release, then change its checksum")
    return yaml_files.load_all(text)
