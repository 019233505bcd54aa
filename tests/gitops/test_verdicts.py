"""Health of an LLMDeployment by the code of Argo CD and Flux, from the status that the operator writes."""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster import programs
from e2e.operator import pods as kubelet
from quire_operator import status
from quire_operator.observed import Observed
from quire_operator.status import Failure
from tests.operator.status.objects import Body, compute, deployment, model_body, pod

ROOT = Path(__file__).parents[2]
CUSTOMIZATION = ROOT / "examples" / "gitops" / "argocd-cm.yaml"
KEY = "resource.customizations.health.serving.quire.dev_LLMDeployment"

SCALED = {"autoscaling": {"minReplicas": 2, "maxReplicas": 8}}
IDLE = {"autoscaling": {"maxReplicas": 8, "backend": "KEDA", "idle": {"afterSeconds": 60}}}


def case(body: Body | None = None, *pods: Body, of: Body | None = None, **fields: Any) -> Body:
    """The object with the status that the operator computes for it."""
    body = body or model_body()
    return {**body, "status": compute(*pods, of=of, body=body, **fields)}


def scaling_up(replicas: int, ready: int, updated: int | None = None) -> Body:
    """The Deployment while pods that an autoscaler added are loading."""
    made = deployment(replicas=replicas, ready=ready, updated=updated)
    made["spec"]["replicas"] = replicas
    return made


def scaled_to_zero() -> Body:
    made = deployment(replicas=0)
    made["spec"]["replicas"] = 0
    return made


def rollout_paused() -> Body:
    made = deployment(ready=0)
    made["spec"]["paused"] = True
    return made


def edited() -> Body:
    """An object whose status is of the generation before."""
    return {**case(of=deployment(ready=1)), "metadata": model_body(generation=3)["metadata"]}


def unreadable() -> Body:
    problem = Failure(reason="InvalidSpec", detail="spec.engine.env[0].name: not allowed")
    return {
        **model_body(),
        "status": status.compute_refused_status(Observed(body=model_body()), problem, now=datetime.now(UTC)),
    }


def failed_twice(code: int, reason: str) -> Body:
    return pod(kubelet.terminated(code, reason, restarts=1))


LATE = deployment(Progressing="ProgressDeadlineExceeded")
UNSCHEDULABLE = pod(kubelet.unschedulable("0/1 nodes are available: 1 Insufficient nvidia.com/gpu."))

# name: object, Argo CD's health, kstatus
CASES: dict[str, tuple[Body, str, str]] = {
    "new": ({**model_body(), "status": {"observedGeneration": -1}}, "Progressing", "InProgress"),
    "edited": (edited(), "Progressing", "InProgress"),
    "first pods": (case(), "Progressing", "InProgress"),
    "loading": (case(None, pod(kubelet.loading())), "Progressing", "InProgress"),
    "no node": (case(None, UNSCHEDULABLE), "Progressing", "InProgress"),
    "ready": (case(None, pod(kubelet.ready()), of=deployment(ready=1)), "Healthy", "Current"),
    "scaled up by an autoscaler": (
        case(model_body(**SCALED), pod(kubelet.loading()), of=scaling_up(6, 2)), "Healthy", "Current"
    ),
    "one of two without a node": (
        case(model_body(replicas=2), UNSCHEDULABLE, of=deployment(replicas=2, ready=1)),
        "Progressing",
        "InProgress",
    ),
    "fewer than the autoscaler's minimum": (
        case(model_body(**SCALED), pod(kubelet.loading()), of=scaling_up(2, 1)), "Progressing", "InProgress"
    ),
    "one of three being replaced": (
        case(model_body(replicas=3), of=deployment(replicas=4, updated=1, ready=3)),
        "Progressing",
        "InProgress",
    ),
    "crashed once": (case(None, pod(kubelet.terminated(70, "EngineCrashed"))), "Progressing", "InProgress"),
    "needs a change": (case(None, failed_twice(2, "ConfigError")), "Degraded", "Failed"),
    "no model": (case(None, failed_twice(66, "ModelNotFound")), "Degraded", "Failed"),
    "too late": (case(None, pod(kubelet.loading()), of=LATE), "Degraded", "Failed"),
    "an invalid spec": (unreadable(), "Degraded", "Failed"),
    "suspended": (case(model_body(suspend=True), of=scaled_to_zero()), "Suspended", "InProgress"),
    "scaled to zero": (case(model_body(**IDLE), of=scaled_to_zero()), "Suspended", "InProgress"),
    "paused": (case(model_body(rollout={"paused": True}), of=rollout_paused()), "Suspended", "InProgress"),
}  # fmt: skip


def verdicts(*arguments: str, objects: list[Body]) -> list[dict[str, str]]:
    """Status and message of each object, by the code of the named tool."""
    programs.build(ROOT / ".cluster" / "bin", ("verdicts",))
    done = subprocess.run(
        [str(ROOT / ".cluster" / "bin" / "verdicts"), *arguments],
        input=json.dumps(objects),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: list[dict[str, str]] = json.loads(done.stdout)
    return result


@pytest.fixture(scope="module")
def argo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    script = tmp_path_factory.mktemp("argo") / "health.lua"
    data = yaml.safe_load(CUSTOMIZATION.read_text(encoding="utf-8"))["data"]
    assert list(data) == [KEY]
    script.write_text(data[KEY], encoding="utf-8")
    results = verdicts("argo", str(script), objects=[body for body, _, _ in CASES.values()])
    return dict(zip(CASES, results, strict=True))


@pytest.fixture(scope="module")
def flux() -> dict[str, dict[str, str]]:
    results = verdicts("kstatus", objects=[body for body, _, _ in CASES.values()])
    return dict(zip(CASES, results, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_argo_cd_shows_the_right_health(argo: dict[str, dict[str, str]], name: str) -> None:
    assert argo[name]["status"] == CASES[name][1], argo[name]
    assert argo[name]["message"]


@pytest.mark.parametrize("name", CASES)
def test_kstatus_of_flux_is_right(flux: dict[str, dict[str, str]], name: str) -> None:
    assert flux[name]["status"] == CASES[name][2], flux[name]


def test_a_failure_that_needs_a_change_is_shown_with_its_reason_and_remedy(
    argo: dict[str, dict[str, str]], flux: dict[str, dict[str, str]]
) -> None:
    for verdict in (argo["needs a change"], flux["needs a change"]):
        assert "Correct spec.engine" in verdict["message"]
    assert argo["needs a change"]["message"].startswith("ConfigError: ")
