"""The earlier release of the upgrade's story shares the heavy layers of the present one."""

from pathlib import Path

import pytest

from e2e.images.recipe import OPERATOR, SERVER, Recipe
from e2e.stories.earlier_release import on_present_layers

ROOT = Path(__file__).parents[2]
EARLIER = (
    "ARG BASE=debian:12-slim\nFROM ${BASE} AS system\n\nFROM system AS code\nCOPY x y\n\nFROM dependencies\n"
)


@pytest.mark.parametrize("image", (OPERATOR, SERVER), ids=lambda image: image.name)
def test_an_earlier_release_is_built_of_its_own_code_on_the_present_layers(image: Recipe) -> None:
    present = (ROOT / image.dockerfile).read_text()
    built = on_present_layers(present, EARLIER)
    heavy = present[: present.index("FROM system AS code")]
    assert "uv pip install" in heavy, "the dependencies"
    assert built == f"{heavy}FROM system AS code\nCOPY x y\n\nFROM dependencies\n"
