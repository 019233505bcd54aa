"""Builds and pushes: decides what is missing, has `tools` make it.

References are `<registry>/<name>:<content hash>`.
"""

import fcntl
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from e2e.images import base, machine, recipe, tools
from e2e.images.recipe import GATEWAY, IMAGES, OPERATOR, SERVER, Recipe
from e2e.images.tools import Build, Tool

# One build at a time on a machine: two would fetch the same gigabytes.
_LOCK = Path("/var/tmp/quire-images.lock")
# Where the lists of the images' contents are put, in the checkout.
SBOMS = Path("dist/sbom")
_MOUNTED = "/mnt"


@dataclass(frozen=True)
class References:
    """Where a cluster finds the images."""

    operator: str
    server: str
    gateway: str = ""


def build(root: Path, environ: Mapping[str, str], images: Sequence[Recipe] = IMAGES) -> None:
    """Builds the images of the working tree that are not in the local store."""
    tool = tools.choose()
    with _one_at_a_time():
        base_name = base.ensure(tool, root, environ)
        for image in images:
            _ensure(tool, image, root, base_name, environ)


def push(
    root: Path,
    registry: str,
    environ: Mapping[str, str],
    within: Sequence[str] = (),
    images: Sequence[Recipe] = IMAGES,
) -> None:
    """Builds what is missing and pushes; layers that the registry has already are not sent again."""
    tool = tools.choose()
    with _one_at_a_time():
        base_name = base.ensure(tool, root, environ)
        for image in images:
            name = _ensure(tool, image, root, base_name, environ)
            target = _target(name, registry)
            began = time.monotonic()
            tool.push(name, target, within)
            print(f"pushed {target} in {time.monotonic() - began:.0f} s", flush=True)


def references(
    root: Path,
    registry: str,
    environ: Mapping[str, str],
    images: Sequence[Recipe] = (OPERATOR, SERVER, GATEWAY),
) -> References:
    """How the images of the working tree are called in a registry, pushed or not.

    `images` are recipes in the order of `References`; an earlier release has no gateway.
    """
    base_name = base.reference(tools.choose(), root, environ)
    return References(*(_target(_local_name(image, root, base_name), registry) for image in images))


def run_server(
    root: Path, environ: Mapping[str, str], argv: Sequence[str], mounts: Mapping[Path, str]
) -> None:
    """Runs a command in the server's image, which has been built."""
    run(root, environ, SERVER, argv, mounts)


def run(
    root: Path, environ: Mapping[str, str], image: Recipe, argv: Sequence[str], mounts: Mapping[Path, str]
) -> None:
    """Runs a command as root in an image that has been built."""
    tool = tools.choose()
    tool.run(_local_name(image, root, base.reference(tool, root, environ)), argv, mounts)


def _local_name(image: Recipe, root: Path, base_name: str) -> str:
    return f"{image.repository}:{recipe.tag(image, root, base_name)}"


def _target(local_name: str, registry: str) -> str:
    return f"{registry}/{local_name.removeprefix('localhost/')}"


def _ensure(tool: Tool, image: Recipe, root: Path, base_name: str, environ: Mapping[str, str]) -> str:
    """The image's local name; built if it is not there."""
    name = _local_name(image, root, base_name)
    if not tool.has(name):
        _build(tool, image, name, root, base_name, environ)
    if image.sbom_writer:
        _copy_sbom(tool, image, name, root)
    return name


def _build(
    tool: Tool, image: Recipe, name: str, root: Path, base_name: str, environ: Mapping[str, str]
) -> None:
    began = time.monotonic()
    tool.clean()
    with machine.secrets(environ) as mounted:
        arguments = {"BASE": base_name, "VERSION": recipe.version(root)}
        tool.build(Build(root, image.dockerfile, arguments, mounted), name)
    tool.remove_other_tags(name)
    print(f"built {name} in {time.monotonic() - began:.0f} s", flush=True)


def _copy_sbom(tool: Tool, image: Recipe, name: str, root: Path) -> None:
    """Puts the list of an image's contents beside it, under the name and the tag of the image."""
    beside = root / SBOMS / f"{name.rpartition('/')[2].replace(':', '_')}.cdx.json"
    if beside.exists():
        return
    beside.parent.mkdir(parents=True, exist_ok=True)
    for earlier in beside.parent.glob(f"{image.name}_*.cdx.json"):
        earlier.unlink()
    tool.run(name, ["cp", image.sbom, f"{_MOUNTED}/{beside.name}"], {beside.parent: _MOUNTED})


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    with os.fdopen(os.open(_LOCK, os.O_RDWR | os.O_CREAT, 0o666), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
