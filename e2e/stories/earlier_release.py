"""An earlier release for the upgrade story: its chart and its images, built from the git history.

`python -m e2e.stories.earlier_release` builds the images alone, for which it needs no cluster.

The images are pushed under names of their own, so that `make up` still finds those of the working tree.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from e2e.images import base, build
from e2e.images.build import References
from e2e.images.recipe import OPERATOR, SERVER
from e2e.images.target import Target

# The first installable commit that keeps rendered manifests in ControllerRevisions.
COMMIT = "50d7e89"
_OPERATOR, _SERVER = (
    replace(image, name=f"{image.name}-earlier", sbom_writer="") for image in (OPERATOR, SERVER)
)
_IMAGES = (_OPERATOR, _SERVER)
# Before it are the base, the system's packages and the dependencies.
_CODE_STAGE = "FROM system AS code\n"


@dataclass(frozen=True)
class EarlierRelease:
    """The source tree of `COMMIT`, and the references of the images that were built from it."""

    tree: Path
    images: References

    def values(self, present: str) -> str:
        """The values `present` (YAML) with this release's images."""
        schema = json.loads((self.tree / "charts/quire/values.schema.json").read_text(encoding="utf-8"))
        # Its chart refuses values that came later.
        values = {k: v for k, v in yaml.safe_load(present).items() if k in schema["properties"]}
        for value, reference in (("image", self.images.operator), ("engineImage", self.images.server)):
            repository, tag = reference.rsplit(":", 1)
            values[value] = {**values.get(value, {}), "repository": repository, "tag": tag}
        return yaml.safe_dump(values)


def earlier_release(root: Path, directory: Path) -> EarlierRelease:
    """Checks `COMMIT` out into `directory`, builds its images where that is not done, and pushes them."""
    _check_out(root, directory)
    target = Target.of(root, os.environ)
    build.push(directory, target.registry, os.environ, target.within, _IMAGES)
    images = build.references(directory, target.registry, os.environ, _IMAGES)
    return EarlierRelease(directory, images)


def _check_out(root: Path, directory: Path) -> None:
    """`COMMIT` on the present base, packages and dependencies, whose layers the registry and the node have
    already: with its own the server's image would be five more gigabytes to build, push and pull.
    """
    # File modes are part of the cache key of an image layer.
    argv = ["git", "-c", "tar.umask=0022", "archive", COMMIT]
    archive = subprocess.run(argv, cwd=root, capture_output=True)
    assert archive.returncode == 0, (
        f"{archive.stderr.decode()}the story installs commit {COMMIT} first: `git fetch --unshallow` gets it"
    )
    subprocess.run(["tar", "--extract", "--directory", str(directory)], input=archive.stdout, check=True)
    for image in (OPERATOR, SERVER):
        for name in image.requirements:
            shutil.copyfile(root / name, directory / name)
        present, earlier = ((tree / image.dockerfile).read_text() for tree in (root, directory))
        (directory / image.dockerfile).write_text(on_present_layers(present, earlier))
    if (root / base.LOCK).exists():
        (directory / base.LOCK).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / base.LOCK, directory / base.LOCK)


def on_present_layers(present: str, earlier: str) -> str:
    """The heavy stages of the present Dockerfile, and what the earlier one makes of its code (pure)."""
    (heavy, _), (_, own) = (text.split(_CODE_STAGE, 1) for text in (present, earlier))
    return f"{heavy}{_CODE_STAGE}{own}"


if __name__ == "__main__":
    if subprocess.run(["git", "cat-file", "-e", COMMIT], capture_output=True).returncode != 0:
        print(f"commit {COMMIT} is not here; the story that needs it says how to get it")
        sys.exit()
    with tempfile.TemporaryDirectory() as tree:
        _check_out(Path.cwd(), Path(tree))
        build.build(Path(tree), os.environ, _IMAGES)
