"""An image holds every package of ours that its code imports: a pod is no place to find out."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.images.recipe import IMAGES, Recipe
from tests.contracts import source_code

ROOT = Path(__file__).parents[2]


def imported(package: Path) -> set[str]:
    names = {name for path in package.rglob("*.py") for name in source_code.of_file(path).imports}
    return {top for name in names if (top := name.partition(".")[0]).startswith("quire_")}


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_an_image_holds_what_its_code_imports(image: Recipe) -> None:
    inside = {Path(package).name for package in image.packages}
    wanted = set().union(*(imported(ROOT / package) for package in image.packages))
    assert wanted <= inside
    dockerfile = (ROOT / image.dockerfile).read_text(encoding="utf-8")
    seen = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert all(f"COPY {package} " in dockerfile and f"!{package}" in seen for package in image.packages)


# gcc and the headers are Triton's (the reason is in server/Dockerfile).
KEPT = {
    "quire-gateway": {"ca-certificates", "python3"},
    "quire-operator": {"python3"},
    "quire-server": {"gcc", "libc6-dev", "libpython3-dev", "python3"},
}


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_an_image_keeps_no_other_debian_packages_than_these(image: Recipe) -> None:
    steps = (ROOT / image.dockerfile).read_text(encoding="utf-8").replace("\\\n", " ").split("&&")
    installed = set().union(*(packages(step) for step in steps if "apt-get install" in step))
    purged = set().union(*(packages(step) for step in steps if "apt-get purge" in step))
    assert installed - purged == KEPT[image.name]
    assert any(step.strip() == "dpkg --purge apt" for step in steps)


def packages(step: str) -> set[str]:
    """What one call of apt-get names."""
    words = step.split("apt-get", 1)[1].split()[1:]
    return {word for word in words if not word.startswith("-")}
