"""What each image is made of, and the tag that follows from it: pure, but for reading the files.

A tag is the hash of everything that goes into the image, so that the same code is never built twice and a
changed file always reaches the cluster under a new name. Knows no build tool.
"""

import hashlib
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Recipe:
    """One image: its Dockerfile and every path that the Dockerfile copies."""

    name: str
    dockerfile: str
    requirements: tuple[str, ...]
    packages: tuple[str, ...]
    # What writes the list of its contents; empty for a commit that has none yet.
    sbom_writer: str = "deploy/images/write_sbom.py"

    @property
    def repository(self) -> str:
        return f"localhost/{self.name}"

    @property
    def sbom(self) -> str:
        """The list of its contents, in the image."""
        return f"/usr/share/sbom/{self.name}.cdx.json"


OPERATOR = Recipe(
    name="quire-operator",
    dockerfile="operator/Dockerfile",
    requirements=("requirements/uv.txt", "requirements/operator.txt"),
    packages=("operator/quire_metrics_adapter", "operator/quire_operator", "operator/quire_sizing"),
)
SERVER = Recipe(
    name="quire-server",
    dockerfile="server/Dockerfile",
    requirements=("requirements/uv.txt", "requirements/server.txt"),
    packages=("kernels/quire_kernels", "server/quire_http", "server/quire_server"),
)
GATEWAY = Recipe(
    name="quire-gateway",
    dockerfile="server/gateway.Dockerfile",
    requirements=("requirements/uv.txt", "requirements/gateway.txt"),
    packages=("server/quire_batch", "server/quire_gateway", "server/quire_http"),
)
# The small ones first: a broken Dockerfile shows before the heavy one is built.
IMAGES = (OPERATOR, GATEWAY, SERVER)


def tag(recipe: Recipe, root: Path, base: str) -> str:
    """The image's tag: the hash of its base, named by digest, and of every file that goes into it."""
    digest = hashlib.sha256(f"{base}\0{version(root)}\0".encode())
    for path in _files(recipe, root):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(root)}\0{path.stat().st_mode & 0o111}\0{content}\0".encode())
    return digest.hexdigest()[:12]


def version(root: Path) -> str:
    """The project's version, as pyproject.toml has it."""
    return str(tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"])


# What `make setup` compiles for this machine; an image compiles its own.
_BUILT_HERE = (".so", ".o")


def _files(recipe: Recipe, root: Path) -> Iterator[Path]:
    for name in (".dockerignore", recipe.dockerfile, *recipe.requirements, recipe.sbom_writer):
        if name:
            yield root / name
    for package in recipe.packages:
        for path in sorted((root / package).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix not in _BUILT_HERE:
                yield path
