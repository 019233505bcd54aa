"""Programs of Debian's packages, unpacked beside the others: installed, they would start services."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from e2e.cluster.errors import HostError


def unpack(
    state: Path, name: str, packages: Sequence[str], program: str, *, with_dependencies: bool = False
) -> Path:
    """The directory into which the packages are unpacked, where no file of it matches `program` yet.
    `with_dependencies`: with those that this machine does not have.
    """
    unpacked = state / name
    state.mkdir(parents=True, exist_ok=True)
    with (state / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not any(unpacked.glob(program)):
            with tempfile.TemporaryDirectory(dir=state) as directory:
                new = Path(directory) / "new"
                if shutil.which("apt-get") is None:
                    raise HostError(f"no apt-get: put {program} into {unpacked}")
                command = _installation(directory) if with_dependencies else ["apt-get", "download", "-q"]
                print(f"fetching Debian's {', '.join(packages)}", flush=True)
                for package in _download(Path(directory), [*command, *packages]):
                    run(["dpkg-deb", "--extract", str(package), str(new)])
                shutil.rmtree(unpacked, ignore_errors=True)
                new.rename(unpacked)
    return unpacked


def has(package: str) -> bool:
    """Whether this release of Debian has a package."""
    done = subprocess.run(["apt-cache", "show", package], capture_output=True, timeout=60, check=False)
    return done.returncode == 0


def update() -> None:
    """Fetch the lists: a fresh machine has none."""
    run(["apt-get", "update", "-q"])


def run(command: list[str], directory: Path | None = None) -> None:
    """Raises HostError where it fails."""
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        raise HostError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")


def _installation(archives: str) -> list[str]:
    """Fetches what an installation would, into a directory."""
    (Path(archives) / "partial").mkdir()
    options = ["-o", f"Dir::Cache::archives={archives}", "-o", "Debug::NoLocking=1"]
    return ["apt-get", "install", "-q", "-y", "--download-only", "--no-install-recommends", *options]


def _download(directory: Path, command: list[str]) -> list[Path]:
    try:
        run(command, directory)
    except HostError:
        if os.geteuid() != 0:
            raise
        update()
        run(command, directory)
    return sorted(directory.glob("*.deb"))
