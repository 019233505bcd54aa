"""The image that the Dockerfiles start from: the one that QUIRE_BASE names, or a Debian made on this machine.

Where no registry can be reached there is no debian:12-slim to pull; Debian's own debootstrap makes the same
from the package archive.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from e2e.images import console
from e2e.images.tools import BASE_REPOSITORY, Tool

PUBLIC_BASE = "debian:12-slim"
_SUITE = "bookworm"
_NOT_NEEDED = (
    "var/cache/apt/archives/*.deb",
    "var/cache/apt/*.bin",
    "var/lib/apt/lists/*_*",
    "var/log/*.log",
    "usr/share/doc/*",
    "usr/share/man/*",
    "usr/share/locale/*",
)


def name(environ: Mapping[str, str]) -> str:
    """The base's name, without making it."""
    given = environ.get("QUIRE_BASE")
    if given:
        return given
    if shutil.which("debootstrap") is None or os.geteuid() != 0:
        return PUBLIC_BASE
    recipe = hashlib.sha256(repr((_SUITE, _NOT_NEEDED)).encode()).hexdigest()[:12]
    return f"{BASE_REPOSITORY}:{recipe}"


def ensure(tool: Tool, base: str) -> None:
    """Makes the base if it is one of ours and is not there yet."""
    if not base.startswith(f"{BASE_REPOSITORY}:") or tool.has(base):
        return
    with tempfile.TemporaryDirectory(prefix="quire-base-", dir="/var/tmp") as directory:
        rootfs = Path(directory) / "rootfs"
        console.run(
            "base",
            ["debootstrap", "--variant=minbase", _SUITE, str(rootfs)],
            milestones="^I: (Base|Retrieving Rel|Unpacking req|Configuring req)",
        )
        _with_updates(rootfs)
        for pattern in _NOT_NEEDED:
            for path in rootfs.glob(pattern):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        tool.from_directory(rootfs, base)
    tool.remove_other_tags(base)


def _with_updates(rootfs: Path) -> None:
    """Adds the suites that carry fixes, next to the archive that debootstrap took, and installs them."""
    sources = rootfs / "etc/apt/sources.list"
    archive = sources.read_text().split()[1]
    sources.write_text(
        f"deb {archive} {_SUITE} main\n"
        f"deb {archive} {_SUITE}-updates main\n"
        f"deb {archive}-security {_SUITE}-security main\n"
    )
    apt = "apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get upgrade -qy"
    console.run("base", ["chroot", str(rootfs), "sh", "-c", apt])
