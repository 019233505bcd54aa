"""The two programs that build images, behind one small interface: buildah (Debian's, no daemon) and docker.

Knows Dockerfiles and image names, not what Quire puts into them.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from e2e.images import console
from e2e.images.errors import ImageError

BASE_REPOSITORY = "localhost/quire-base"
_BASE_CONTAINER = "quire-base-in-the-making"

# Loopback is fast and the processor is not: the lightest compression, which containerd also unpacks fastest.
_COMPRESSION = ("--compression-format", "zstd", "--compression-level", "1")


@dataclass(frozen=True)
class Build:
    """One build: which Dockerfile, of which tree, with what."""

    context: Path
    dockerfile: str
    arguments: Mapping[str, str]
    secrets: Mapping[str, Path]


class Tool(Protocol):
    """What is needed of a build program."""

    def has(self, image: str) -> bool:
        """Whether the image is in the local store."""

    def build(self, build: Build, image: str) -> None:
        """Builds, using what earlier builds left."""

    def run(self, image: str, argv: Sequence[str], mounts: Mapping[Path, str]) -> None:
        """Runs a command of the image as root, with directories of this machine mounted, and waits."""

    def push(self, image: str, target: str, within: Sequence[str]) -> None:
        """Pushes; `within` is put before the command (to enter a network namespace)."""

    def remove_other_tags(self, image: str) -> None:
        """Removes all other tags of the image's repository."""

    def clean(self) -> None:
        """Removes what our builds left that were killed. No build of ours may be running."""


class Buildah:
    """buildah with its default store, so that all checkouts of a machine share the heavy layers."""

    def has(self, image: str) -> bool:
        return console.succeeds(["buildah", "inspect", "--type", "image", image])

    def digest(self, image: str) -> str | None:
        """The digest of an image that was made here; None if it is not in the local store."""
        argv = ["buildah", "inspect", "--type", "image", "--format", "{{.FromImageDigest}}", image]
        return console.output(argv) if self.has(image) else None

    def build(self, build: Build, image: str) -> None:
        # Killed along with us: the next build assumes that no other one runs.
        argv = ["setpriv", "--pdeathsig", "KILL", "buildah", "build"]
        argv += ["--isolation", "chroot", "--layers", "--tag", image]
        argv += ["--file", str(build.context / build.dockerfile), *_options(build), str(build.context)]
        console.run(image.rsplit("/", 1)[-1], argv, milestones=r"STEP \d+/\d+: FROM|^Installed")

    def from_directory(self, rootfs: Path, image: str) -> None:
        """Makes an image of one layer."""
        container = console.output(["buildah", "from", "--name", _BASE_CONTAINER, "scratch"])
        try:
            console.output(["buildah", "add", "--quiet", container, str(rootfs), "/"])
            console.output(["buildah", "commit", "--quiet", container, image])
        finally:
            console.output(["buildah", "rm", container])

    def run(self, image: str, argv: Sequence[str], mounts: Mapping[Path, str]) -> None:
        container = console.output(["buildah", "from", image])
        volumes = [f"--volume={here}:{there}" for here, there in mounts.items()]
        inside = ["buildah", "run", "--isolation", "chroot", "--user", "0:0", *volumes, container, "--"]
        try:
            console.run(argv[0], ["setpriv", "--pdeathsig", "KILL", *inside, *argv])
        finally:
            console.output(["buildah", "rm", container])

    def push(self, image: str, target: str, within: Sequence[str]) -> None:
        verify = f"--tls-verify={'false' if target.startswith('localhost:') else 'true'}"
        killed_with_us = ["setpriv", "--pdeathsig", "KILL"]
        argv = [
            *within,
            *killed_with_us,
            "buildah",
            "push",
            verify,
            *_COMPRESSION,
            image,
            f"docker://{target}",
        ]
        console.run(f"push {target}", argv)

    def remove_other_tags(self, image: str) -> None:
        for other in _others(image, console.output(["buildah", "images", "--format", "{{.Name}}:{{.Tag}}"])):
            console.succeeds(["buildah", "rmi", other])

    def clean(self) -> None:
        listed = console.output(["buildah", "containers", "--quiet", "--noheading", "--notruncate"])
        for container in listed.split():
            inspected = json.loads(console.output(["buildah", "inspect", "--type", "container", container]))
            if is_of_ours(inspected):
                console.output(["buildah", "rm", container])


class Docker:
    """docker with BuildKit, for clusters that are reached by KUBECONFIG."""

    def has(self, image: str) -> bool:
        return console.succeeds(["docker", "image", "inspect", image])

    def build(self, build: Build, image: str) -> None:
        argv = ["docker", "build", "--progress", "plain", "--tag", image]
        argv += ["--file", str(build.context / build.dockerfile), *_options(build), str(build.context)]
        console.run(image.rsplit("/", 1)[-1], argv, milestones=r"^#\d+ \[")

    def run(self, image: str, argv: Sequence[str], mounts: Mapping[Path, str]) -> None:
        volumes = [f"--volume={here}:{there}" for here, there in mounts.items()]
        command = ["docker", "run", "--rm", "--user=0:0", *volumes, f"--entrypoint={argv[0]}", image]
        console.run(argv[0], [*command, *argv[1:]])

    def push(self, image: str, target: str, within: Sequence[str]) -> None:
        if within:
            raise ImageError("docker cannot push into the cluster's network: apt-get install buildah")
        console.output(["docker", "tag", image, target])
        console.run(f"push {target}", ["docker", "push", target])

    def remove_other_tags(self, image: str) -> None:
        for other in _others(
            image, console.output(["docker", "images", "--format", "{{.Repository}}:{{.Tag}}"])
        ):
            console.succeeds(["docker", "rmi", other])

    def clean(self) -> None:
        """BuildKit's daemon does that."""


def is_of_ours(container: Mapping[str, Any]) -> bool:
    """Whether a working container, as `buildah inspect` shows it, is of a build of ours (pure).

    It is the base in the making, starts from our base, or went through a step that only our Dockerfiles have.
    """
    if container["Container"] == _BASE_CONTAINER or container["FromImage"].startswith(BASE_REPOSITORY):
        return True
    history = container["OCIv1"].get("history") or []
    return any("install -d -o 65532 -g 65532 /home/quire" in step.get("created_by", "") for step in history)


def choose() -> Tool:
    """buildah where it is installed, else docker where its daemon answers."""
    if shutil.which("buildah"):
        return Buildah()
    if shutil.which("docker") and console.succeeds(["docker", "info"]):
        return Docker()
    raise ImageError("neither buildah nor a running docker was found: apt-get install buildah")


def _options(build: Build) -> list[str]:
    options = [f"--build-arg={name}={value}" for name, value in build.arguments.items()]
    return options + [f"--secret=id={name},src={path}" for name, path in build.secrets.items()]


def _others(image: str, listed: str) -> list[str]:
    repository = image.rsplit(":", 1)[0]
    return [name for name in listed.split() if name.rsplit(":", 1)[0] == repository and name != image]
