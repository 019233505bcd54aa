"""KEDA's operator and metrics server, built from its Go module: once, in ten minutes on two cores.

3,300 packages, including the clients of every cloud, are too many for `make setup`.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import crds
from e2e.cluster.errors import BuildError

MODULE = crds.SCALED_OBJECT.module
SUM = "h1:OlGqI/Ih1kUcz0gJ9B5nxOZU+j5GXQzc2ELByHs7cYA="  # of all its files, as Go reckons it
PACKAGES = {"keda-operator": "./cmd/operator", "keda-metrics-apiserver": "./cmd/adapter"}


@dataclass(frozen=True)
class Programs:
    """`tree`: the module's files, of which the CRDs lie in config/crd/bases."""

    tree: Path
    operator: Path
    metrics_server: Path


def build(bin_dir: Path) -> Programs:
    """Both programs in `bin_dir`; quick where Go has built them before. Raises BuildError."""
    module = json.loads(_go("mod", "download", "-json", MODULE, cwd=Path("/")))
    if module["Sum"] != SUM:
        raise BuildError(f"{MODULE} is not what it was: its sum is {module['Sum']}, expected {SUM}")
    tree = Path(module["Dir"])
    operator, metrics_server = (_compile(tree, package, bin_dir / name) for name, package in PACKAGES.items())
    return Programs(tree, operator, metrics_server)


def _compile(tree: Path, package: str, program: Path) -> Path:
    print(f"\nbuilding {program.name}: minutes, where Go has not built it before", flush=True)
    flags = ("-mod=readonly", "-trimpath", "-buildvcs=false", "-ldflags=-s -w")
    _go("build", *flags, "-o", str(program), package, cwd=tree)
    return program


def _go(*arguments: str, cwd: Path) -> str:
    environ = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "", "GOWORK": "off"}
    done = subprocess.run(["go", *arguments], cwd=cwd, env=environ, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"go {' '.join(arguments)}: {done.stdout}{done.stderr}")
    return done.stdout
