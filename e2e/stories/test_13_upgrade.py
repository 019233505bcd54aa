"""Story: the operator is upgraded while three models serve; their pods change only when a spec is edited. One
that is upgraded to an image that is nowhere says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from e2e.kubectl import Manifest
from e2e.stories.conftest import ROOT
from e2e.stories.deployment import SERVED_NAME, LLMDeployment
from e2e.stories.earlier_release import EarlierRelease, earlier_release
from e2e.stories.load import StreamLoad
from e2e.stories.release import OperatorRelease
from e2e.stories.waiting import eventually

pytestmark = pytest.mark.alone  # the operator is replaced

NAMES = ("one", "two", "three")


@pytest.fixture
def install_earlier_release(
    operator: OperatorRelease, tmp_path: Path
) -> Iterator[Callable[[], EarlierRelease]]:
    """A function that installs the earlier release; the present one is installed again after the test."""
    present = operator.values()

    def install() -> EarlierRelease:
        old = earlier_release(ROOT, tmp_path)
        replace(operator, root=old.tree).install(old.values(present))
        return old

    yield install
    operator.install(present)


def containers(llm: LLMDeployment) -> set[tuple[str, str, int]]:
    """Pod uid, container id and restart count of every pod."""

    def identity(pod: Manifest) -> tuple[str, str, int]:
        (container,) = pod["status"]["containerStatuses"]
        return pod["metadata"]["uid"], container["containerID"], container["restartCount"]

    return {identity(pod) for pod in llm.pods()}


def images(llm: LLMDeployment) -> set[str]:
    return {pod["spec"]["containers"][0]["image"] for pod in llm.pods()}


def available_revision(llm: LLMDeployment) -> object:
    return llm.status().get("availableRenderRevision")


@pytest.mark.deep
def test_an_upgrade_restarts_no_pod_and_breaks_no_stream_and_an_edit_takes_the_new_defaults(
    install_earlier_release: Callable[[], EarlierRelease],
    operator: OperatorRelease,
    deploy: Callable[..., LLMDeployment],
) -> None:
    present, new_image = operator.values(), operator.engine_image()
    old_image = install_earlier_release().images.server
    models = [deploy(name) for name in NAMES]
    for model in models:
        model.wait_ready()
    before = [containers(model) for model in models]
    assert [images(model) for model in models] == [{old_image}] * 3 and old_image != new_image

    with ExitStack() as stack:
        loads = [stack.enter_context(StreamLoad(model.base_url, SERVED_NAME, clients=1)) for model in models]
        operator.install(present)
        for model in models:
            eventually(
                f"the status of {model.name} has a newer render revision",
                partial(available_revision, model),
                timeout=90,
            )
        for load in loads:
            load.wait_for_more(2)
        assert [containers(model) for model in models] == before

        models[0].patch({"engine": {"maxNumSeqs": 4}})
        models[0].wait_settled()
        eventually("the edited one has the new image", lambda: images(models[0]) == {new_image})
        for load in loads:
            load.wait_for_more(2)

    assert [containers(model) for model in models[1:]] == before[1:]
    assert [load.broken for load in loads] == [[], [], []]
    assert available_revision(models[0]) is None


@pytest.mark.deep
def test_an_image_that_cannot_be_pulled_is_named(
    operator: OperatorRelease, deploy: Callable[..., LLMDeployment]
) -> None:
    values = operator.values()
    operator.upgrade("--set", "engineImage.tag=no-such-tag")
    try:
        llm = deploy("pull")
        ready = llm.wait_reason("Ready", "ImagePullFailed")
    finally:
        operator.install(values)

    assert "no-such-tag" in ready["message"]
    llm.wait_ready()
