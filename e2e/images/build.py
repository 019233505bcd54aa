"""Builds and pushes: decides what is missing, has `tools` make it.

Called by `__main__` and by `make up`. References are `<registry>/<name>:<content hash>`.
"""

import fcntl
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from e2e.images import base, machine, recipe, tools
from e2e.images.recipe import IMAGES, Recipe

# One build at a time on a machine: two would fetch the same gigabytes.
_LOCK = Path("/var/tmp/quire-images.lock")


@dataclass(frozen=True)
class References:
    """Where a cluster finds the images."""

    operator: str
    server: str


def references(root: Path, registry: str, environ: Mapping[str, str]) -> References:
    """The images' names in a registry, as the working tree is now."""
    base_name = base.name(environ)
    operator, server = (f"{registry}/{image.name}:{recipe.tag(image, root, base_name)}" for image in IMAGES)
    return References(operator=operator, server=server)


def build(root: Path, environ: Mapping[str, str]) -> None:
    """Builds the images of the working tree that are not in the local store."""
    tool, base_name = tools.choose(), base.name(environ)
    with _one_at_a_time():
        for image in IMAGES:
            name = _local(image, root, base_name)
            if tool.has(name):
                print(f"{name} is built", flush=True)
                continue
            began = time.monotonic()
            base.ensure(tool, base_name)
            with machine.secrets(environ) as mounted:
                arguments = {"BASE": base_name, "VERSION": recipe.version(root)}
                tool.build(tools.Build(root, image.dockerfile, arguments, mounted), name)
            tool.forget_others(name)
            print(f"built {name} in {time.monotonic() - began:.0f} s", flush=True)


def push(root: Path, registry: str, environ: Mapping[str, str], within: Sequence[str] = ()) -> References:
    """Pushes the built images (what the registry has already costs nothing) and says how they are called."""
    tool, base_name = tools.choose(), base.name(environ)
    for image in IMAGES:
        name = _local(image, root, base_name)
        began = time.monotonic()
        tool.push(name, f"{registry}/{image.name}:{name.rsplit(':', 1)[1]}", within)
        print(f"pushed {name} to {registry} in {time.monotonic() - began:.0f} s", flush=True)
    return references(root, registry, environ)


def _local(image: Recipe, root: Path, base_name: str) -> str:
    return f"{image.repository}:{recipe.tag(image, root, base_name)}"


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    with os.fdopen(os.open(_LOCK, os.O_RDWR | os.O_CREAT, 0o666), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
