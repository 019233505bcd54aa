"""`kubectl quire status` as kubectl runs it, against a real API server that the operator writes to."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from e2e.cluster.apiserver import ApiServer
from e2e.operator import pods
from e2e.operator.statusz import statusz_server
from e2e.operator.world import World
from e2e.waiting import eventually

pytestmark = [pytest.mark.api, pytest.mark.usefixtures("operator")]
BIN = Path(__file__).parents[2] / ".cluster" / "bin"
GB = 10**9


@pytest.fixture
def environment(server: ApiServer) -> dict[str, str]:
    """kubectl and the plugin on the PATH, and an administrator's kubeconfig."""
    path = f"{Path(sys.executable).parent}:{BIN}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "KUBECONFIG": str(server.kubeconfig)}


@pytest.fixture
def quire(environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["kubectl", "quire", *arguments], capture_output=True, text=True, timeout=60, env=environment
        )

    return run


def test_status_of_a_loading_model_shows_a_progress_bar_and_exits_with_3(
    world: World, namespace: str, quire: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    answer = {"phase": "loading", "loadedBytes": 3 * GB, "totalBytes": 8 * GB, "etaSeconds": 41}
    with statusz_server(answer) as speaker:
        world.deploy(namespace, "m")
        world.make_pod(namespace, "m", pods.loading(ip=speaker.ip))
        eventually("progress", lambda: world.status(namespace, "m").get("model", {}).get("bytesLoaded"))
        shown = quire("status", "m", "-n", namespace)
        listed = quire("status", "-A")

    assert (shown.returncode, shown.stderr) == (3, "")
    assert shown.stdout.startswith(f"{namespace}/m: Loading\n")
    assert re.search(r"model +\[#{9}\.{15}\]  38%  3\.00 of 8\.00 GB, 41 s left", shown.stdout)
    (line,) = [line for line in listed.stdout.splitlines() if line.split()[:2] == [namespace, "m"]]
    assert listed.returncode == 0
    assert line.split()[2] == "Loading" and "38%" in line
    assert "\x1b" not in shown.stdout + listed.stdout


def test_status_of_a_stalled_llmdeployment_shows_the_failure_message_and_exits_with_4(
    world: World, namespace: str, quire: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    world.deploy(namespace, "m")
    world.make_pod(namespace, "m", pods.terminated(66, "ModelNotFound", restarts=2))
    world.roll_out(namespace, "m", ready=0, replicas=1)
    world.wait_condition(namespace, "m", "Stalled", "True", "ModelNotFound")

    shown = quire("status", "m", "-n", namespace)

    failure = world.status(namespace, "m")["lastFailure"]
    assert shown.returncode == 4
    assert failure["message"] in shown.stdout and "exit code 66" in shown.stdout


def test_status_with_watch_prints_each_change_until_the_plugin_is_terminated(
    world: World, namespace: str, environment: dict[str, str]
) -> None:
    world.deploy(namespace, "m")
    command: Sequence[str] = ["kubectl", "quire", "status", "m", "-n", namespace, "-w", "-o", "json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        first = json.loads(child.stdout.readline())
        world.patch("LLMDeployment", namespace, "m", {"metadata": {"annotations": {"seen": "yes"}}})
        while "seen" not in json.loads(child.stdout.readline())["metadata"].get("annotations", {}):
            pass
        child.terminate()
        child.stdout.read()

    assert first["metadata"]["name"] == "m"


def test_errors_of_kubectl_are_passed_on_without_traceback(
    namespace: str, quire: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    missing = quire("status", "missing", "-n", namespace)
    both = quire("status", "m", "-A")

    assert missing.returncode == 1 and '"missing" not found' in missing.stderr
    assert both.returncode == 1 and "not both" in both.stderr
    assert "Traceback" not in missing.stderr + both.stderr
