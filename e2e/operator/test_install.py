"""The chart on a real API server, with the commands of the docs: installed, upgraded, removed.

The commands of docs/operations.md, which wait for pods, run in a story. The operator's pods do not run here:
its process is started as they would be, with the RBAC that Helm installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.api.client import Client, RefusedError
from e2e.cluster import programs
from e2e.cluster.apiserver import ApiServer
from e2e.operator import pods, rights
from e2e.operator.process import ROOT, OperatorProcess
from e2e.operator.world import BUDGET, CHILDREN, World
from e2e.waiting import eventually

pytestmark = [pytest.mark.api, pytest.mark.timeout(180)]

Run = Callable[[str], str]
CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/llmdeployments.serving.quire.dev"
ROLE = "/apis/rbac.authorization.k8s.io/v1/clusterroles/quire-operator"
KINDS = (*CHILDREN, BUDGET, "ControllerRevision", "ReplicaSet", "Pod")
INSTALL = f"helm upgrade --install quire charts/quire --namespace quire-system --set {rights.IMAGES}"
UNINSTALL = "helm uninstall quire --namespace quire-system"
NEW_WORDS = ("State of the deployment.", "Its state.")


def commands(page: str) -> list[str]:
    """The code blocks of a page."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```\n(.*?)```", text, flags=re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


@pytest.fixture
def bare() -> Iterator[tuple[ApiServer, World]]:
    """An API server without any object of Quire."""
    programs.build(ROOT / ".cluster" / "bin", ("helm",))
    with ApiServer() as server, Client(server.kubeconfig) as client:
        yield server, World(client, Path(os.devnull))


@pytest.fixture
def run(bare: tuple[ApiServer, World], tmp_path: Path) -> Run:
    """Runs a command of a page unchanged, in a directory that looks like the repository."""
    server, _ = bare
    for name in ("deploy", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "charts", tmp_path / "charts")
    environment = {**os.environ, "KUBECONFIG": str(server.kubeconfig), "HOME": str(tmp_path)}
    environment["PATH"] = f"{server.bin_dir}:{environment['PATH']}"

    def run(command: str) -> str:
        done = subprocess.run(
            command.split(), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    return run


def there(world: World, path: str) -> bool:
    try:
        world.client.request("GET", path)
    except RefusedError:
        return False
    return True


def state(world: World) -> dict[str, Any]:
    """Every serving object with its version."""
    found = {(kind, body["metadata"]["name"]): body for kind in KINDS for body in world.find(kind, "team")}
    return {" ".join(key): body["metadata"]["resourceVersion"] for key, body in found.items()}


def test_upgrading_and_uninstalling_the_chart_change_no_serving_object(
    bare: tuple[ApiServer, World], run: Run, tmp_path: Path
) -> None:
    server, world = bare
    others = [line for page in ("gitops.md", "observability.md") for line in commands(page)]
    for command in (
        "kubectl create namespace quire-system",
        INSTALL,
        *(o for o in others if o.startswith("helm")),
        INSTALL,
    ):
        run(command)
    world.namespace("team")
    kubeconfig = rights.token_kubeconfig(server, world, "quire-operator", tmp_path / "of-the-operator")
    operator = OperatorProcess("first", kubeconfig, tmp_path).start().wait_leading(world)
    try:
        world.deploy("team", "m")
        world.make_pod("team", "m", pods.ready())
        world.roll_out("team", "m", ready=1)
        world.wait_condition("team", "m", "Ready", "True")
    finally:
        operator.stop()
    before = state(world)

    newer(tmp_path / "charts" / "quire")
    run(INSTALL)
    image = "registry.example/quire-server:2"
    operator = OperatorProcess("second", kubeconfig, tmp_path, QUIRE_ENGINE_IMAGE=image).start()
    try:
        operator.wait_leading(world)
        eventually("it has looked", lambda: world.status("team", "m").get("availableRenderRevision"))
        world.wait_condition("team", "m", "Ready", "True")
        assert state(world) == before
    finally:
        operator.stop()
    assert NEW_WORDS[1] in str(world.client.request("GET", CRD)), "the CRD is upgraded with the chart"

    run(UNINSTALL)
    assert state(world) == before
    assert there(world, CRD) and not there(world, ROLE)

    run(INSTALL)
    assert there(world, ROLE), "the CRD that was kept is taken over again"
    run("kubectl delete llmdep --all -A --timeout=20s")
    run(UNINSTALL)
    run("kubectl delete crd llmdeployments.serving.quire.dev --timeout=20s")
    assert not there(world, CRD)


def newer(chart: Path) -> None:
    """Changes the chart to another release, with another CRD."""
    for path, old, new in (
        (chart / "Chart.yaml", "appVersion: 0.1.0", "appVersion: 0.1.1"),
        (chart / "files" / "llmdeployments.yaml", *NEW_WORDS),
    ):
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.write_text(text.replace(old, new), encoding="utf-8")


@pytest.mark.deep
def test_the_commands_of_the_gitops_page_work(
    bare: tuple[ApiServer, World], run: Run, tmp_path: Path
) -> None:
    server, world = bare
    wanted = commands("gitops.md")
    assert len(wanted) >= 7
    run("kubectl create namespace team-a")
    run("kubectl create namespace argocd")
    run("kubectl create configmap argocd-cm --namespace argocd --from-literal=url=https://argocd.example.com")
    run(next(command for command in wanted if "deploy/install.yaml" in command))
    model = yaml.safe_load((ROOT / "examples" / "smollm2.yaml").read_text(encoding="utf-8"))
    model["metadata"] = {"name": "my-model"}
    (tmp_path / "my-model.yaml").write_text(yaml.safe_dump(model), encoding="utf-8")
    kubeconfig = rights.token_kubeconfig(server, world, "quire-operator", tmp_path / "of-the-operator")
    operator = OperatorProcess("applied", kubeconfig, tmp_path).start()
    try:
        operator.wait_leading(world)
        eventually("the kind", lambda: there(world, "/apis/serving.quire.dev/v1alpha1/llmdeployments"))
        run("kubectl apply -f my-model.yaml")
        eventually("its children", lambda: world.has_children("default", "my-model"))
        world.roll_out("default", "my-model", ready=1)
        for command in wanted:
            if not command.startswith("helm"):  # has its own release
                run(command)
    finally:
        operator.stop()
    data = world.client.request("GET", "/api/v1/namespaces/argocd/configmaps/argocd-cm")["data"]
    assert set(data) == {"url", "resource.customizations.health.serving.quire.dev_LLMDeployment"}
