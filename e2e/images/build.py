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
from e2e.images.recipe import IMAGES, SERVER, Recipe
from e2e.images.tools import Build, Tool

# One build at a time on a machine: two would fetch the same gigabytes.
_LOCK = Path("/var/tmp/quire-images.lock")


@dataclass(frozen=True)
class References:
    """Where a cluster finds the images."""

    operator: str
    server: str


def build(root: Path, environ: Mapping[str, str], images: Sequence[Recipe] = IMAGES) -> None:
    """Builds the images of the working tree that are not in the local store."""
    tool, base_name = tools.choose(), base.name(environ)
    with _one_at_a_time():
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
    tool, base_name = tools.choose(), base.name(environ)
    with _one_at_a_time():
        for image in images:
            name = _ensure(tool, image, root, base_name, environ)
            target = _target(name, registry)
            began = time.monotonic()
            tool.push(name, target, within)
            print(f"pushed {target} in {time.monotonic() - began:.0f} s", flush=True)


def references(
    root: Path, registry: str, environ: Mapping[str, str], images: tuple[Recipe, Recipe] = IMAGES
) -> References:
    """How the images of the working tree are called in a registry, pushed or not.

    `images` are the operator's and the server's recipe, in this order.
    """
    base_name = base.name(environ)
    operator, server = (_target(_local_name(image, root, base_name), registry) for image in images)
    return References(operator=operator, server=server)


def run_server(
    root: Path, environ: Mapping[str, str], argv: Sequence[str], mounts: Mapping[Path, str]
) -> None:
    """Runs a command in the server's image, which has been built."""
    tools.choose().run(_local_name(SERVER, root, base.name(environ)), argv, mounts)


def _local_name(image: Recipe, root: Path, base_name: str) -> str:
    return f"{image.repository}:{recipe.tag(image, root, base_name)}"


def _target(local_name: str, registry: str) -> str:
    return f"{registry}/{local_name.removeprefix('localhost/')}"


def _ensure(tool: Tool, image: Recipe, root: Path, base_name: str, environ: Mapping[str, str]) -> str:
    """The image's local name; built if it is not there."""
    name = _local_name(image, root, base_name)
    if tool.has(name):
        return name
    began = time.monotonic()
    tool.clean()
    base.ensure(tool, base_name)
    with machine.secrets(environ) as mounted:
        arguments = {"BASE": base_name, "VERSION": recipe.version(root)}
        tool.build(Build(root, image.dockerfile, arguments, mounted), name)
    tool.remove_other_tags(name)
    print(f"built {name} in {time.monotonic() - began:.0f} s", flush=True)
    return name


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    with os.fdopen(os.open(_LOCK, os.O_RDWR | os.O_CREAT, 0o666), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
