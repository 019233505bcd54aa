"""What is cleaned up after a killed build is ours, and only what is ours."""

from pathlib import Path
from typing import Any

import pytest

from e2e.images.tools import is_of_ours

ROOT = Path(__file__).parents[2]
STEP = "/bin/sh -c apt-get update && install -d -o 65532 -g 65532 /home/quire"


def container(
    name: str = "c", image: str = "", history: list[dict[str, str]] | None = None
) -> dict[str, Any]:
    return {"Container": name, "FromImage": image, "OCIv1": {"history": history}}


@pytest.mark.parametrize(
    "left",
    [
        container("quire-base-in-the-making"),
        container(image="localhost/quire-base:c710eda164aa"),
        container(image="99a0396d11b4", history=[{"created_by": "/bin/sh"}, {"created_by": STEP}]),
    ],
    ids=["the base", "the first step", "a later step"],
)
def test_every_step_of_our_builds_is_recognised(left: dict[str, Any]) -> None:
    assert is_of_ours(left)


@pytest.mark.parametrize(
    "theirs",
    [container("mine"), container(image="docker.io/library/debian:12", history=[{"created_by": "/bin/sh"}])],
    ids=["from scratch", "from a public image"],
)
def test_a_container_of_another_build_is_left_alone(theirs: dict[str, Any]) -> None:
    assert not is_of_ours(theirs)


@pytest.mark.parametrize("dockerfile", ["operator/Dockerfile", "server/Dockerfile"])
def test_the_step_by_which_ours_are_known_is_in_both_dockerfiles(dockerfile: str) -> None:
    from_first_stage = (ROOT / dockerfile).read_text().split("FROM system")[0]
    assert STEP.split("&& ")[-1] in from_first_stage
