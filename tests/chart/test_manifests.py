"""The single file and the kustomize base are the chart with its defaults, without any trace of Helm."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from e2e import yaml_files
from e2e.api.client import Client
from e2e.cluster import programs
from e2e.cluster.apiserver import ApiServer
from e2e.kubectl import Kubectl
from tests.chart.helm import BIN, ROOT, Body, named, of_kind, render

FILE = ROOT / "deploy" / "install.yaml"


def identity(body: Body) -> tuple[str, str, str]:
    return body["kind"], body["metadata"].get("namespace", ""), body["metadata"]["name"]


@pytest.fixture(scope="module")
def written() -> list[Body]:
    """The objects in the file, which is long and therefore read once."""
    return list(yaml_files.load_all(FILE.read_text(encoding="utf-8")))


def kustomized(folder: str) -> list[Body]:
    programs.build(BIN, ("kube",))
    command = [str(BIN / "kubectl"), "kustomize", str(ROOT / folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml_files.load_all(done.stdout))


def test_the_file_is_generated_from_the_chart() -> None:
    command = [sys.executable, "-m", "docs.manifests", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 0, done.stderr


def test_the_file_has_the_namespace_and_every_object_of_the_chart_and_no_trace_of_helm(
    written: list[Body],
) -> None:
    assert identity(written[0]) == ("Namespace", "", "quire-system")
    assert {identity(b) for b in written[1:]} == {identity(b) for b in render()}
    assert "helm" not in FILE.read_text(encoding="utf-8").lower()


def test_the_kustomize_base_equals_the_file(written: list[Body]) -> None:
    def known(bodies: list[Body]) -> dict[tuple[str, str, str], Body]:
        return {identity(body): body for body in bodies}

    assert known(kustomized("deploy")) == known(written)


def test_the_overlay_has_its_own_images_and_no_metrics_adapter() -> None:
    bodies = kustomized("examples/gitops/overlay")

    (deployment,) = of_kind(bodies, "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    environment = {e["name"]: e.get("value") for e in container["env"]}
    assert container["image"] == "registry.example.com/quire-operator:0.1.0"
    assert environment["QUIRE_ENGINE_IMAGE"] == "registry.example.com/quire-server:0.1.0"
    without = named(render("--set", "metricsAdapter.enabled=false"), "Deployment", "quire-operator")
    (expected,) = without["spec"]["template"]["spec"]["containers"]
    assert environment.keys() == {e["name"] for e in expected["env"]}
    assert environment["QUIRE_LOAD_URL"] == ""
    assert not any("metrics-adapter" in body["metadata"]["name"] for body in bodies)
    assert of_kind(bodies, "APIService") == []


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with ApiServer() as server:
        yield server


@pytest.mark.api
@pytest.mark.parametrize("arguments", [("-f", "deploy/install.yaml"), ("-k", "examples/gitops/overlay")])
def test_a_second_server_side_apply_changes_nothing(server: ApiServer, arguments: tuple[str, str]) -> None:
    kube = Kubectl(server.bin_dir, server.kubeconfig)
    flag, path = arguments
    apply = ("apply", "--server-side", flag, str(ROOT / path))
    with Client(server.kubeconfig) as client:
        kube.run(*apply)
        before = versions(client)
        kube.run(*apply)

        assert before and versions(client) == before


def versions(client: Client) -> dict[str, Any]:
    paths = ("/apis/apps/v1/deployments", "/apis/rbac.authorization.k8s.io/v1/clusterroles")
    items = [item for path in paths for item in client.request("GET", path)["items"]]
    ours = [item["metadata"] for item in items if item["metadata"]["name"].startswith("quire-")]
    return {metadata["name"]: metadata["resourceVersion"] for metadata in ours}
