"""Story: a gateway in front of a model: it is asked by the model's name, and the model answers no other.

The clients' streams go on while the gateway's replicas are replaced one after the other.
"""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from e2e.images import build
from e2e.images.target import Target
from e2e.kubectl import Kubectl, KubectlError
from e2e.stories.deployment import LLMDeployment, is_ready, small_spec
from e2e.stories.release import NAMESPACE, OperatorRelease
from e2e.stories.waiting import eventually

pytestmark = pytest.mark.alone  # the operator is upgraded

ROOT = Path(__file__).parents[2]
NAME = "quire-gateway"
USER = f"system:serviceaccount:{NAMESPACE}:{NAME}"
STREAMS = 4
NUM_WAITING = 100


@dataclass
class Streams:
    """Clients that stream one answer after the other; `broken` has what was no whole answer."""

    url: str
    model: str
    whole: int = 0
    broken: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        body = {"model": self.model, "prompt": "Once", "max_tokens": 60, "ignore_eos": True, "stream": True}
        while not self._stop.is_set():
            try:
                answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=120)
            except httpx.HTTPError as error:
                self.broken.append(repr(error))
                continue
            if (
                answer.status_code == 200
                and answer.text.endswith("[DONE]\n\n")
                and "error" not in answer.text
            ):
                self.whole += 1
            else:
                self.broken.append(f"{answer.status_code} {answer.text[-300:]}")

    def stop(self) -> None:
        self._stop.set()


@pytest.fixture(scope="module")
def gateway(kube: Kubectl, operator: OperatorRelease, namespace: str) -> Iterator[str]:
    """The URL of a gateway for the namespace of the story."""
    images = build.references(ROOT, Target.of(ROOT, os.environ).registry, os.environ)
    repository, tag = images.gateway.rsplit(":", 1)
    operator.upgrade(
        "--set", f"gateway.enabled=true,gateway.namespaces={{{namespace}}}",
        "--set", f"gateway.image.repository={repository}", "--set-string", f"gateway.image.tag={tag}",
        "--set", "gateway.resources.requests.cpu=50m,gateway.drainSeconds=60",
    )  # fmt: skip
    service = kube.get("services", NAME, NAMESPACE)
    assert service is not None
    eventually("both gateways are ready", lambda: len(ready_gateways(kube)) == 2)
    yield f"http://{service['spec']['clusterIP']}:{service['spec']['ports'][0]['port']}"
    operator.upgrade("--set", "gateway.enabled=false")


@pytest.fixture(scope="module")
def model(kube: Kubectl, namespace: str, gateway: str) -> Iterator[LLMDeployment]:
    """A model that was rendered after the gateway was there, and that the gateway has seen."""
    llm = LLMDeployment(kube, namespace, "behind")
    llm.apply(small_spec())
    llm.wait_ready()
    eventually("the gateway serves it", lambda: llm.name in served(gateway))
    yield llm
    llm.remove()


def ready_gateways(kube: Kubectl) -> set[str]:
    pods = kube.list("pods", NAMESPACE, f"app.kubernetes.io/name={NAME}")
    return {p["metadata"]["uid"] for p in pods if is_ready(p) and "deletionTimestamp" not in p["metadata"]}


def served(url: str) -> list[str]:
    return [card["id"] for card in httpx.get(f"{url}/v1/models", timeout=10).json()["data"]]


def ask(url: str, name: str) -> httpx.Response:
    body = {"model": name, "prompt": "Once", "max_tokens": 5, "temperature": 0}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=120)


def test_a_client_asks_the_gateway_by_the_deployment_s_name_and_gets_an_answer(
    gateway: str, model: LLMDeployment
) -> None:
    answer = ask(gateway, model.name)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 5


def test_who_passes_the_gateway_by_is_refused_and_the_model_stays_ready(
    gateway: str, model: LLMDeployment
) -> None:
    refused = ask(model.base_url.removesuffix("/v1"), model.name)
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "gateway_token_required")
    assert model.condition("Ready")["status"] == "True"


def test_the_gateway_may_read_no_secret_and_its_private_key_is_in_no_other_namespace(
    kube: Kubectl, namespace: str, gateway: str
) -> None:
    for verb, resource in (("get", "secrets"), ("list", "pods"), ("patch", "llmdeployments")):
        with pytest.raises(KubectlError, match="^kubectl .*: no$"):
            kube.run("auth", "can-i", verb, resource, "-n", namespace, f"--as={USER}")
    assert kube.run(
        "auth", "can-i", "watch", "endpointslices.discovery.k8s.io", "-n", namespace, f"--as={USER}"
    )
    assert kube.get("secrets", f"{NAME}-signing-key", namespace) is None
    public = kube.get("configmaps", f"{NAME}-public-keys", namespace)
    assert public is not None and "PRIVATE" not in str(public["data"])


def test_the_key_stays_when_the_chart_is_upgraded(
    kube: Kubectl, operator: OperatorRelease, gateway: str, model: LLMDeployment
) -> None:
    def key() -> object:
        secret = kube.get("secrets", f"{NAME}-signing-key", NAMESPACE)
        assert secret is not None
        return secret["data"]

    before = key()
    operator.upgrade()
    assert key() == before
    assert ask(gateway, model.name).status_code == 200


def test_the_commands_of_the_tutorial_end_with_paris_a_bill_and_a_closed_model(
    kube: Kubectl, namespace: str, gateway: str, deploy: Callable[..., LLMDeployment], tmp_path: Path
) -> None:
    deploy("smollm2").wait_ready()
    page = (ROOT / "docs" / "shared-endpoint.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "kubeconfig").write_text(kube.kubeconfig.read_text(encoding="utf-8"))
    environment = os.environ | {
        "KUBECONFIG": str(tmp_path / "kubeconfig"),
        "PATH": f"{kube.bin}:{os.environ['PATH']}",
    }
    here = f"kubectl config set-context --current --namespace={namespace} > /dev/null"
    script = "\n".join(("set -euo pipefail", here, *blocks, "kill %1"))
    try:
        done = subprocess.run(
            ["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=500
        )
    finally:
        kube.delete("llmclients", "search", namespace)
        kube.delete("llmroutes", "chat", namespace)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Paris" in done.stdout
    assert "Closed for maintenance." in done.stdout
    assert re.search(r"llmclient\S*/search +false +True +Ready +\d{2} ", done.stdout), done.stdout


def test_a_model_without_requests_stops_and_all_who_wait_for_it_are_answered(
    gateway: str, model: LLMDeployment
) -> None:
    scaling = {"minReplicas": 0, "maxReplicas": 2, "idle": {"afterSeconds": 15}}
    model.patch({"replicas": None, "autoscaling": scaling})
    try:
        eventually("it is idle", lambda: model.status()["phase"] == "Idle" and not model.pods())
        begun = time.monotonic()
        with ThreadPoolExecutor(NUM_WAITING) as threads:
            answers = list(threads.map(lambda _: ask(gateway, model.name), range(NUM_WAITING)))
        print(f"{NUM_WAITING} requests waited for a model without pods {time.monotonic() - begun:.1f} s")
        assert {answer.status_code for answer in answers} == {200}
        model.wait_ready()
    finally:
        model.patch({"replicas": 1, "autoscaling": None})
        model.wait_ready()


def test_no_stream_breaks_while_the_gateways_are_replaced(
    kube: Kubectl, gateway: str, model: LLMDeployment
) -> None:
    before = ready_gateways(kube)
    streams = Streams(gateway, model.name)
    threads = [threading.Thread(target=streams.run, daemon=True) for _ in range(STREAMS)]
    for thread in threads:
        thread.start()
    try:
        eventually("streams have begun", lambda: streams.whole >= STREAMS)
        kube.run("rollout", "restart", "deployment", NAME, "-n", NAMESPACE)
        kube.run("rollout", "status", "deployment", NAME, "-n", NAMESPACE, "--timeout=300s")
        eventually("all gateways are new", lambda: not before & ready_gateways(kube))
        begun = streams.whole
        eventually("streams go on", lambda: streams.whole >= begun + STREAMS)
    finally:
        streams.stop()
        for thread in threads:
            thread.join(180)
    assert streams.broken == []


def test_a_deployment_that_was_rendered_before_answers_until_it_is_rendered_anew(
    kube: Kubectl, operator: OperatorRelease, deploy: Callable[..., LLMDeployment], gateway: str
) -> None:
    operator.upgrade("--set", "gateway.enabled=false")
    llm = deploy("before")
    llm.wait_ready()
    operator.upgrade("--set", "gateway.enabled=true")
    direct = llm.base_url.removesuffix("/v1")
    assert httpx.get(f"{direct}/v1/models", timeout=10).status_code == 200

    llm.patch({"rollout": {"restartId": "trust"}})
    eventually(
        "only the gateway is answered",
        lambda: httpx.get(f"{direct}/v1/models", timeout=10).status_code == 401,
        timeout=240,
    )
