"""Story: 1 -> 4 -> 1 replicas under a real queue, by the HorizontalPodAutoscaler and the metrics adapter.

Forty-eight clients send one request after the other, each over a connection that it keeps. The server closes
connections at a certain age, here after seconds instead of minutes, so new replicas get their share all the
same. A replica runs one request at a time, so the queue is long enough for four replicas while the clients
run, and empty as soon as they stop.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import pytest

from e2e.stories.deployment import SERVED_NAME, LLMDeployment
from e2e.stories.waiting import eventually

pytestmark = pytest.mark.alone  # the load of other stories would change what is measured

CLIENTS = 48
CONNECTION_AGE = 15  # seconds
MOST_REQUESTS = 400  # of each client, so that a failed test ends
MAX_REPLICAS = 4
SCALING = {
    "minReplicas": 1,
    "maxReplicas": MAX_REPLICAS,
    "backend": "HPA",
    "metrics": [{"type": "QueueDepth", "targetPerReplica": 10}],
    "behavior": {
        "scaleUp": {"periodSeconds": 5, "pods": 1, "percent": 0},
        "scaleDown": {"stabilizationWindowSeconds": 15, "periodSeconds": 5, "pods": 1},
    },
}
ENGINE = {
    "maxModelLen": 512,
    "maxNumSeqs": 1,
    "kvCache": {"memory": "64Mi"},
    "extraArgs": [f"--max-connection-age-seconds={CONNECTION_AGE}"],
}

READ_METRICS = """
import urllib.request
print(urllib.request.urlopen("http://127.0.0.1:8000/metrics").read().decode())
"""


@dataclass
class Clients:
    """`answers` counts complete answers, `errors` describes every other outcome."""

    url: str
    answers: int = 0
    errors: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self, number: int) -> None:
        with httpx.Client(base_url=self.url, timeout=300) as client:
            for asked in range(MOST_REQUESTS):
                if self._stop.is_set():
                    return
                body = {"model": SERVED_NAME, "prompt": f"Client {number}, {asked}:", "max_tokens": 4}
                try:
                    client.post("/completions", json=body).raise_for_status()
                    self.answers += 1
                except httpx.HTTPError as error:
                    self.errors.append(f"client {number}, request {asked}: {error}")
                    self._stop.wait(1)

    @contextmanager
    def sending(self) -> Iterator[None]:
        threads = [threading.Thread(target=self.run, args=(n,), daemon=True) for n in range(CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(timeout=300)


@dataclass
class ReplicaLog:
    """Samples, twice a second, the Deployment's replicas and the condition ScalingActive."""

    llm: LLMDeployment
    wanted: list[int] = field(default_factory=list)
    active: set[tuple[str, str]] = field(default_factory=set)
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self._stop.wait(0.5):
            deployment = self.llm.kube.get("deployments", self.llm.name, self.llm.namespace) or {}
            number = deployment["spec"]["replicas"]
            if self.wanted[-1:] != [number]:
                self.wanted.append(number)
            condition = self.llm.condition("ScalingActive")
            self.active.add((condition["status"], condition["reason"]))

    @contextmanager
    def recording(self) -> Iterator[None]:
        thread = threading.Thread(target=self.run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join(timeout=30)


def requests_by_pod(llm: LLMDeployment) -> dict[str, float]:
    """Completed requests of each ready pod, as it counts them itself."""
    counts = {}
    for name in (pod["metadata"]["name"] for pod in llm.ready_pods()):
        text = llm.kube.run("exec", "-n", llm.namespace, name, "--", "python", "-c", READ_METRICS)
        numbers = re.findall(r'^llm_requests_total{.*status="success".*} (\S+)$', text, re.MULTILINE)
        counts[name] = sum(map(float, numbers))
    return counts


def every_replica_answers(llm: LLMDeployment) -> bool:
    counts = requests_by_pod(llm)
    return len(counts) == MAX_REPLICAS and min(counts.values()) > 0


def ready_replicas(llm: LLMDeployment) -> int:
    return int(llm.status().get("readyReplicas", 0))


@pytest.mark.deep
def test_replicas_follow_the_queue_without_flapping_and_new_ones_answer_clients_that_keep_connections(
    deploy: Callable[..., LLMDeployment],
) -> None:
    llm = deploy("autoscale", autoscaling=SCALING, engine=ENGINE)
    llm.wait_ready()
    llm.wait_reason("ScalingActive", "ValidMetricFound")
    replica_log, clients = ReplicaLog(llm), Clients(llm.base_url)

    with replica_log.recording():
        with clients.sending():
            eventually(
                "all replicas are ready", lambda: ready_replicas(llm) == MAX_REPLICAS, timeout=120, poll=0.5
            )
            eventually("all of them serve", lambda: len(llm.endpoints()) == MAX_REPLICAS)
            eventually("all of them answer", lambda: every_replica_answers(llm))
        eventually("one replica is wanted", lambda: replica_log.wanted[-1] == 1, poll=0.5)
        eventually(
            "one replica is left", lambda: ready_replicas(llm) == len(llm.pods()) == 1, timeout=120, poll=0.5
        )

    assert clients.errors == []
    assert replica_log.wanted == [1, 2, 3, 4, 3, 2, 1], "it scales up and down once, one replica at a time"
    assert replica_log.active == {("True", "ValidMetricFound")}
    assert llm.condition("Ready")["status"] == "True"
