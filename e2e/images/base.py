"""The image that the Dockerfiles start from, by digest: QUIRE_BASE, a Debian made here, or the locked one.

A tag names another image tomorrow, so no build starts from one. Where no registry can be reached there is no
debian:12-slim to pull; Debian's own debootstrap makes the same from the package archive, and the digest of
what it made names it. docker knows a digest only of what is in a registry: it starts from the locked one.
"""

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TypeGuard

from e2e.images import console, registry
from e2e.images.errors import ImageError
from e2e.images.tools import BASE_REPOSITORY, Buildah, Tool

PUBLIC_BASE = "debian:12-slim"
LOCK = Path("deploy/images/base.txt")
_BY_DIGEST = re.compile(r"[^\s@]+@sha256:[0-9a-f]{64}")
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


def reference(tool: Tool, root: Path, environ: Mapping[str, str]) -> str:
    """The base by its digest, without making it."""
    if given := environ.get("QUIRE_BASE"):
        return checked(given, f"QUIRE_BASE={given}")
    if _makes_bases(tool):
        digest = tool.digest(_local_tag())
        if digest is None:
            raise ImageError("the base image has not been made yet: python -m e2e.images build")
        return f"{BASE_REPOSITORY}@{digest}"
    lock = root / LOCK
    if not lock.exists():
        raise ImageError(
            f"no digest of {PUBLIC_BASE} is recorded: `make lock-base` asks its registry and writes {LOCK}, "
            "to be committed. Or apt-get install buildah debootstrap, and be root, to make a Debian here."
        )
    return checked(lock.read_text().strip(), str(LOCK))


def checked(image: str, what: str) -> str:
    """The reference, which has to have a digest (pure)."""
    if not _BY_DIGEST.fullmatch(image):
        raise ImageError(
            f"{what} has no digest, and a tag names another image tomorrow: write NAME@sha256:..., which "
            "`docker buildx imagetools inspect NAME` and `skopeo inspect docker://NAME` print"
        )
    return image


def ensure(tool: Tool, root: Path, environ: Mapping[str, str]) -> str:
    """The base by its digest; made if it is one of ours and not there yet. No other build may be running."""
    if not environ.get("QUIRE_BASE") and _makes_bases(tool) and tool.digest(_local_tag()) is None:
        tool.clean()
        _make(tool, _local_tag())
    return reference(tool, root, environ)


def lock(root: Path) -> str:
    """Records the digest that the public base has at its registry now."""
    image = f"{PUBLIC_BASE}@{registry.digest(PUBLIC_BASE)}"
    (root / LOCK).write_text(f"{image}\n")
    return image


def _makes_bases(tool: Tool) -> TypeGuard[Buildah]:
    return isinstance(tool, Buildah) and bool(shutil.which("debootstrap")) and os.geteuid() == 0


def _local_tag() -> str:
    """The name under which a base stays in the local store: the hash of how it is made."""
    recipe = hashlib.sha256(repr((_SUITE, _NOT_NEEDED)).encode()).hexdigest()[:12]
    return f"{BASE_REPOSITORY}:{recipe}"


def _make(tool: Buildah, image: str) -> None:
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
        tool.from_directory(rootfs, image)
    tool.remove_other_tags(image)


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
