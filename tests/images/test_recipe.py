"""An image's tag follows from what goes into it, and from nothing else."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.images import recipe

ROOT = Path(__file__).parents[2]
BASE = "debian:12-slim@sha256:" + 64 * "0"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of everything that the images see."""
    for name in (".dockerignore", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    for directory in ("deploy/images", "requirements", "operator", "server", "kernels"):
        shutil.copytree(ROOT / directory, tmp_path / directory, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def edit(path: Path) -> None:
    path.write_text(path.read_text() + "# edited\n")


CHANGES: dict[str, tuple[Callable[[Path], None], set[str]]] = {
    "code of the operator": (lambda t: edit(t / "operator/quire_operator/__init__.py"), {"quire-operator"}),
    "code of the metrics adapter": (
        lambda t: edit(t / "operator/quire_metrics_adapter/__init__.py"),
        {"quire-operator"},
    ),
    "code of the server": (lambda t: edit(t / "server/quire_server/__init__.py"), {"quire-server"}),
    "code of the gateway": (lambda t: edit(t / "server/quire_gateway/__init__.py"), {"quire-gateway"}),
    "what servers share": (
        lambda t: edit(t / "server/quire_http/__init__.py"),
        {"quire-gateway", "quire-server"},
    ),
    "code of the kernels": (lambda t: edit(t / "kernels/quire_kernels/__init__.py"), {"quire-server"}),
    "lock of the server": (lambda t: edit(t / "requirements/server.txt"), {"quire-server"}),
    "lock of the gateway": (lambda t: edit(t / "requirements/gateway.txt"), {"quire-gateway"}),
    "lock of the operator": (lambda t: edit(t / "requirements/operator.txt"), {"quire-operator"}),
    "Dockerfile of the server": (lambda t: edit(t / "server/Dockerfile"), {"quire-server"}),
    "list of what is inside": (
        lambda t: edit(t / "deploy/images/write_sbom.py"),
        {"quire-gateway", "quire-operator", "quire-server"},
    ),
    "lock of the developers": (lambda t: edit(t / "requirements/dev.txt"), set()),
    "time of a file": (lambda t: os.utime(t / "server/quire_server/__init__.py", (1, 1)), set()),
}


def tags(root: Path) -> dict[str, str]:
    return {image.name: recipe.tag(image, root, BASE) for image in recipe.IMAGES}


@pytest.mark.parametrize("what", CHANGES)
def test_a_tag_changes_with_what_is_in_the_image_and_only_with_that(tree: Path, what: str) -> None:
    change, expected = CHANGES[what]
    before = tags(tree)
    change(tree)
    after = tags(tree)
    assert {name for name in before if before[name] != after[name]} == expected


def test_what_was_built_on_this_machine_is_not_part_of_an_image(tree: Path) -> None:
    before = tags(tree)
    cache = tree / "server/quire_server/__pycache__"
    cache.mkdir(exist_ok=True)
    (cache / "x.cpython-311.pyc").write_bytes(b"x")
    (tree / "kernels/quire_kernels/cpu/libquire_cpu.so").write_bytes(b"x")
    assert tags(tree) == before


def test_another_base_gives_other_tags(tree: Path) -> None:
    assert recipe.tag(recipe.SERVER, tree, "a") != recipe.tag(recipe.SERVER, tree, "b")


def test_every_path_that_a_dockerfile_copies_counts() -> None:
    for image in recipe.IMAGES:
        copied = {
            word
            for line in (ROOT / image.dockerfile).read_text().splitlines()
            if line.startswith("COPY ") and "--from" not in line
            for word in line.split()[1:-1]
        }
        assert copied == {*image.requirements, *image.packages, image.sbom_writer}
