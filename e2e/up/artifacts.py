"""`python -m e2e.up.artifacts [push]`: the images, and the model, which the server's own image converts.

Runs beside the cluster's start, whose registry is there from the beginning. Needs no torch on this machine.
"""

import fcntl
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from e2e import gguf
from e2e.cluster.errors import ClusterError
from e2e.images import build
from e2e.images.errors import ImageError
from e2e.images.target import Target
from e2e.up.place import MODEL

# The last file that a conversion writes.
_MANIFEST = "quire-manifest.json"
_MOUNTED = "/models"


def prepare(root: Path, environ: Mapping[str, str]) -> None:
    """Builds the images, then converts the model if the cache does not hold it."""
    model = root / MODEL
    print("  downloading the model", flush=True)
    file = None if is_complete(model) else gguf.download(model.parent)
    build.build(root, environ)
    if file is None:
        return
    with (model.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_complete(model):
            shutil.rmtree(model, ignore_errors=True)
            command = ["quire-server", "import-gguf", f"{_MOUNTED}/{file.name}", f"{_MOUNTED}/{model.name}"]
            build.run_server(root, environ, command, {model.parent: _MOUNTED})
            print(f"converted {file.name}", flush=True)


def is_complete(model: Path) -> bool:
    """Whether the model's directory is there with all of its files."""
    return (model / _MANIFEST).exists()


def push(root: Path, environ: Mapping[str, str]) -> None:
    """Sends the images to the registry of the cluster in use."""
    target = Target.of(root, environ)
    build.push(root, target.registry, environ, target.within)


def main(argv: Sequence[str]) -> int:
    """An error of ours is one message, not a traceback."""
    root = Path.cwd().resolve()
    try:
        prepare(root, os.environ)
        if argv == ["push"]:
            push(root, os.environ)
    except (ImageError, ClusterError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
