"""Story: a gateway in front of a model: it is asked by the model's name, and the model answers no other.

The clients' streams go on while the gateway's replicas are replaced one after the other.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from openai import APIError, OpenAI
from openai.types import BatchRequestCounts

from e2e import cluster
from e2e.cluster import pki, valkey
from e2e.images import build
from e2e.images.target import Target
from e2e.kubectl import Kubectl, KubectlError, Manifest
from e2e.ports import free_ports
from e2e.stories import provider
from e2e.stories.deployment import LLMDeployment, is_ready, small_spec
from e2e.stories.model_sources import PORT as PROVIDER_PORT
from e2e.stories.model_sources import apply_and_wait
from e2e.stories.release import NAMESPACE, OperatorRelease
from e2e.stories.waiting import eventually
from e2e.up.place import Place
from e2e.up.volume import Volumes

pytestmark = pytest.mark.alone  # the operator is upgraded

ROOT = Path(__file__).parents[2]
NAME = "quire-gateway"
API_VERSION = "serving.quire.dev/v1alpha1"
USER = f"system:serviceaccount:{NAMESPACE}:{NAME}"
PATH = "/v1/completions"
STREAMS = 4
NUM_WAITING = 100
NUM_LINES = 60
LIMIT = 30  # requests a minute
PROVIDER_TEXT = "from the provider"
ASKED_IN_TURNS = 10  # of each of two models


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


def ask(url: str, name: str, prompt: str = "Once", timeout: float = 120) -> httpx.Response:
    body = {"model": name, "prompt": prompt, "max_tokens": 5, "temperature": 0}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=timeout)


@dataclass
class SeenPods:
    """The pods that were there while they were watched: how many, and the most at the same time."""

    num_seen: int = 0
    most: int = 0


@contextmanager
def watched_pods(kube: Kubectl, namespace: str, selector: str) -> Iterator[SeenPods]:
    """What a watch of the API server says of the pods with these labels."""
    seen, here, known = SeenPods(), set[str](), set[str]()
    path = f"/api/v1/namespaces/{namespace}/pods?watch=true&labelSelector={quote(selector)}"
    watch = subprocess.Popen(kube.argv("get", "--raw", path), stdout=subprocess.PIPE, text=True)

    def read() -> None:
        assert watch.stdout is not None
        for line in watch.stdout:
            event = json.loads(line)
            pod = event["object"]
            uid, phase = pod["metadata"]["uid"], pod.get("status", {}).get("phase")
            if event["type"] == "DELETED" or phase in ("Succeeded", "Failed"):
                here.discard(uid)
                continue
            here.add(uid)
            known.add(uid)
            seen.num_seen, seen.most = len(known), max(seen.most, len(here))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        eventually("the pod that runs is seen", lambda: seen.num_seen > 0)
        yield seen
    finally:
        watch.terminate()
        watch.wait()
        thread.join(30)
        assert watch.stdout is not None
        watch.stdout.close()


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


@pytest.mark.deep
def test_conversations_move_to_a_new_model_step_by_step_and_back_where_it_fails(
    kube: Kubectl, gateway: str, model: LLMDeployment, deploy: Callable[..., LLMDeployment]
) -> None:
    new = deploy("behind-new", suspend=True)
    numbers = itertools.count()  # each is a conversation of its own

    def apply(*steps: Manifest) -> None:
        abort = {"errorPercent": 10, "minRequests": 10}
        spec = {
            "models": ["staged"],
            "rules": [{"targets": [{"deployment": model.name}]}],
            "hold": {"maxSeconds": 0},
            "rollout": {"deployment": new.name, "steps": list(steps), "abortOn": abort},
        }
        metadata = {"name": "staged", "namespace": model.namespace}
        kube.apply({"apiVersion": API_VERSION, "kind": "LLMRoute", "metadata": metadata, "spec": spec})

    def phase() -> str:
        found = kube.get("llmroutes", "staged", model.namespace) or {}
        return str(((found.get("status") or {}).get("rollout") or {}).get("phase"))

    def failed() -> bool:
        return ask(gateway, "staged", f"{next(numbers)} Once").status_code != 200

    def reaches(wanted: str) -> bool:
        failed()
        return phase() == wanted

    apply({"weight": 50, "pauseSeconds": 600}, {"weight": 100})
    try:
        eventually("the new model fails", failed)
        eventually("the rollout is taken back", lambda: reaches("Aborted"))
        eventually("no gateway goes there", lambda: not any(failed() for _ in range(20)))

        new.patch({"suspend": False})
        new.wait_ready()
        apply({"weight": 50, "pauseSeconds": 5}, {"weight": 100, "pauseSeconds": 0})
        eventually("all conversations have moved", lambda: reaches("Completed"))
        model.patch({"suspend": True})
        eventually("the old model is gone", lambda: not model.pods())
        assert not any(failed() for _ in range(10))
    finally:
        kube.delete("llmroutes", "staged", model.namespace)
        model.patch({"suspend": False})
        model.wait_ready()


def test_a_model_without_requests_stops_and_all_who_wait_for_it_are_answered(
    gateway: str, model: LLMDeployment
) -> None:
    scaling = {"minReplicas": 0, "maxReplicas": 2, "idle": {"afterSeconds": 8}}
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


@pytest.mark.deep
def test_two_models_take_turns_on_one_accelerator_and_all_who_ask_are_answered(
    kube: Kubectl, namespace: str, gateway: str, deploy: Callable[..., LLMDeployment]
) -> None:
    sharing = {"pool": "card", "minimumStaySeconds": 10}
    first, second = (deploy(name, sharing=sharing) for name in ("turns-a", "turns-b"))
    first.wait_ready()
    second.wait_reason("Ready", "Asleep")
    eventually("the gateway serves both", lambda: {first.name, second.name} <= set(served(gateway)))
    with watched_pods(kube, namespace, "serving.quire.dev/pool=card") as pods:
        begun = time.monotonic()
        asked = [first.name, second.name] * ASKED_IN_TURNS
        with ThreadPoolExecutor(len(asked)) as threads:
            answers = list(threads.map(lambda name: ask(gateway, name, timeout=300), asked))
        print(f"{len(asked)} requests to two models took {time.monotonic() - begun:.1f} s")
        assert {answer.status_code for answer in answers} == {200}, [answer.text for answer in answers]
        assert ask(gateway, first.name, timeout=300).status_code == 200, "and back again"
        assert ask(gateway, second.name, timeout=300).status_code == 200
        assert pods.num_seen >= 4, "each had its turn twice"
    assert pods.most == 1, "never two pods of the pool at once"
    state = eventually("it says what the swap took", lambda: swapped(second))
    print(f"the last swap took {state['lastSwapSeconds']} s")


def swapped(llm: LLMDeployment) -> Manifest | None:
    """status.sharing of a model whose turn has begun."""
    state: Manifest = llm.status().get("sharing", {})
    is_awake = state.get("state") == "Awake" and state.get("awake") == llm.name
    return state if is_awake and "lastSwapSeconds" in state else None


@pytest.mark.deep
def test_a_batch_of_openai_s_client_is_done_line_by_line_though_its_pod_is_killed(
    kube: Kubectl, operator: OperatorRelease, volumes: Volumes, gateway: str, model: LLMDeployment
) -> None:
    storage = volumes.spare(NAMESPACE, access="ReadWriteOnce").get("storageClassName", "")
    client = OpenAI(base_url=f"{gateway}/v1", api_key="none", max_retries=0)
    body = {"model": model.name, "max_tokens": 8, "temperature": 0}
    names = [f"line-{number:02}" for number in range(NUM_LINES)]
    lines = [
        {"custom_id": name, "method": "POST", "url": PATH, "body": body | {"prompt": f"{name} Once"}}
        for name in names
    ]
    claim = f"batch.storage.size=1Gi,batch.storage.storageClassName={storage}"
    operator.upgrade("--set", f"batch.enabled=true,{claim}")
    try:
        content = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
        uploaded = eventually("files are taken", lambda: upload(client, content))
        batch = client.batches.create(
            input_file_id=uploaded, endpoint="/v1/completions", completion_window="24h"
        )
        eventually("some lines are done", lambda: counts(client, batch.id).completed > NUM_LINES // 10)
        pod = kube.list("pods", NAMESPACE, "app.kubernetes.io/name=quire-batch")[0]["metadata"]["name"]
        kube.run("delete", "pod", pod, "-n", NAMESPACE, "--grace-period=0", "--force")
        assert counts(client, batch.id, patient=True).completed < NUM_LINES, "it is killed in the middle"

        eventually("it is completed", lambda: status_of(client, batch.id) == "completed")
        output = client.batches.retrieve(batch.id).output_file_id
        assert output is not None
        answers = [json.loads(line) for line in client.files.content(output).text.splitlines()]
        assert sorted(one["custom_id"] for one in answers) == names
        assert {one["response"]["status_code"] for one in answers} == {200}
    finally:
        operator.upgrade("--set", "batch.enabled=false")
        for each in kube.list("persistentvolumeclaims", NAMESPACE, "app.kubernetes.io/name=quire-batch"):
            kube.delete("persistentvolumeclaim", each["metadata"]["name"], NAMESPACE)


def upload(client: OpenAI, content: bytes) -> str | None:
    """The id of the file; None while the gateways do not know where files go."""
    with contextlib.suppress(APIError):
        return client.files.create(file=("lines.jsonl", content), purpose="batch").id
    return None


def counts(client: OpenAI, batch: str, *, patient: bool = False) -> BatchRequestCounts:
    """How many lines are done. ``patient``: while its pod is away, too."""
    if patient:
        eventually("it answers again", lambda: status_of(client, batch))
    found = client.batches.retrieve(batch).request_counts
    assert found is not None
    return found


def status_of(client: OpenAI, batch: str) -> str | None:
    with contextlib.suppress(APIError):
        return str(client.batches.retrieve(batch).status)
    return None


@pytest.mark.deep
def test_limits_are_exact_over_both_gateways_with_a_store_and_hold_without(
    kube: Kubectl,
    place: Place,
    operator: OperatorRelease,
    gateway: str,
    model: LLMDeployment,
    tmp_path: Path,
) -> None:
    if not place.is_ours:
        pytest.skip("the store runs on the host of our own cluster")
    address = str(cluster.current(ROOT).addresses.host_ip)
    (port,) = free_ports(1)
    key = f"sk-{secrets.token_hex(32)}"
    digest = hashlib.sha256(key.encode()).hexdigest()
    limited = {"keyHashes": [digest], "limits": {"requestsPerMinute": LIMIT}}
    metadata = {"name": "limited", "namespace": model.namespace}
    url = {"name": "limit-store", "namespace": NAMESPACE}
    password = secrets.token_hex(16)
    options = ("--bind", address, "--port", str(port), "--save", "", "--requirepass", password)
    program = ["setpriv", "--pdeathsig", "KILL", *valkey.unpack(place.checkout.state), *options]
    kube.apply(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": url,
            "stringData": {"url": f"redis://:{password}@{address}:{port}/0"},
        },
        {"apiVersion": API_VERSION, "kind": "LLMClient", "metadata": metadata, "spec": limited},
    )
    store = f"gateway.limitStore.port={port},gateway.limitStore.urlSecretRef.name"
    with (tmp_path / "store.log").open("w") as log:
        server = subprocess.Popen(program, stdout=log, stderr=log, cwd=tmp_path)
    try:
        operator.upgrade("--set", f"{store}=limit-store")
        eventually("both use the store", lambda: stores_up(kube, gateway) == {1.0})
        begun = time.monotonic()
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda _: asked_with(gateway, model.name, key), range(3 * LIMIT)))
        again = (time.monotonic() - begun) * LIMIT / 60
        assert set(answers) == {200, 429}
        assert LIMIT <= answers.count(200) <= LIMIT + again + 1

        server.kill()
        server.wait()
        eventually("the store is missed", lambda: stores_up(kube, gateway) == {0.0})
        assert {asked_with(gateway, model.name, key) for _ in range(LIMIT)} <= {200, 429}
    finally:
        server.kill()
        server.wait()
        kube.delete("llmclients", "limited", model.namespace)
        operator.upgrade("--set", f"{store}=")
        kube.delete("secrets", "limit-store", NAMESPACE)


def asked_with(url: str, name: str, key: str) -> int:
    """The status of an answer to one token."""
    body = {"model": name, "prompt": "Once", "max_tokens": 1}
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{url}{PATH}", json=body, headers=headers, timeout=120).status_code


def stores_up(kube: Kubectl, url: str) -> set[float]:
    """What the gateways say of their limit store. Connections are spread over both of them."""
    found = set()
    for _ in range(8):
        lines = httpx.get(f"{url}/metrics", timeout=10).text.splitlines()
        found |= {float(line.split()[1]) for line in lines if line.startswith("gateway_limit_store_up ")}
    return found


@pytest.mark.deep
def test_a_provider_answers_what_no_replica_does_and_prompts_of_its_class_and_only_it_has_the_key(
    kube: Kubectl,
    operator: OperatorRelease,
    gateway: str,
    model: LLMDeployment,
    deploy: Callable[..., LLMDeployment],
    tmp_path: Path,
) -> None:
    namespace, key, authority = model.namespace, secrets.token_hex(16), pki.Authority(tmp_path)
    away = deploy("away", suspend=True)
    host = provider.host(namespace)
    image = build.references(ROOT, Target.of(ROOT, os.environ).registry, os.environ).server
    apply_and_wait(kube, *provider.manifests(namespace, image, key, authority))
    kube.apply(*provided(namespace, model.name, away.name, key, authority))
    networks = json.dumps(["0.0.0.0/0"])
    egress = json.dumps([{"cidr": "0.0.0.0/0", "ports": [PROVIDER_PORT]}])
    allowed = json.dumps([{"name": provider.NAME, "hosts": [host], "namespaces": [namespace]}])
    try:
        operator.upgrade(
            "--set-json", f"gateway.externalSecrets={allowed}",
            "--set-json", f"gateway.externalEgress={egress}",
            "--set-json", f"gateway.externalPrivateNetworks={networks}",
        )  # fmt: skip
        answer = eventually(
            "the provider answers for a model that is away", lambda: answered(gateway, "overflowing")
        )
        assert answer.headers["x-quire-degraded"] == f"external={provider.NAME}"
        assert answer.json()["choices"][0]["text"] == PROVIDER_TEXT

        def of_class(prompt: str) -> bool:
            answer = ask(gateway, "classed", prompt)
            return answer.status_code == 200 and answer.json()["choices"][0]["text"] == PROVIDER_TEXT

        eventually("a simple prompt goes there", lambda: of_class("simple: what is a tree?"))
        assert not of_class("Once"), "another prompt is answered here"
        shown = eventually(
            "both gateways have it, and none is left of before", lambda: of_two(kube, namespace)
        )
        assert key not in json.dumps(shown), "the key is in no status"
        logs = kube.run("logs", "-n", NAMESPACE, "-l", f"app.kubernetes.io/name={NAME}", "--tail=-1")
        assert provider.NAME in logs and key not in logs
    finally:
        operator.upgrade(
            "--set-json", "gateway.externalSecrets=[]",
            "--set-json", "gateway.externalEgress=[]",
            "--set-json", "gateway.externalPrivateNetworks=[]",
        )  # fmt: skip
        for route in ("classed", "away"):
            kube.delete("llmroutes", route, namespace)
        kube.delete("llmexternalbackends", provider.NAME, namespace)
        kube.delete("secrets", provider.NAME, NAMESPACE)


def of_two(kube: Kubectl, namespace: str) -> Manifest | None:
    """The backend once two gateways are seen, and both know it."""
    shown = kube.get("llmexternalbackends", provider.NAME, namespace)
    gateways = (shown or {}).get("status", {}).get("gateways", {})
    return shown if gateways.get("applied") == gateways.get("seen") == 2 else None


def provided(namespace: str, model: str, away: str, key: str, authority: pki.Authority) -> list[Manifest]:
    """The provider as a backend, a route with a class of prompts, and one that falls back to it."""
    return [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": provider.NAME, "namespace": NAMESPACE},
            "stringData": {"api-key": key},
        },
        {
            "apiVersion": API_VERSION,
            "kind": "LLMExternalBackend",
            "metadata": {"name": provider.NAME, "namespace": namespace},
            "spec": {
                "baseURL": f"https://{provider.host(namespace)}:{PROVIDER_PORT}/v1",
                "model": "theirs",
                "apiKeySecretRef": {"name": provider.NAME, "key": "api-key"},
                "caBundle": authority.certificate.read_text(encoding="utf-8"),
            },
        },
        {
            "apiVersion": API_VERSION,
            "kind": "LLMRoute",
            "metadata": {"name": "classed", "namespace": namespace},
            "spec": {
                "models": ["classed"],
                "routing": {"classifier": {"service": provider.CLASSIFIER, "port": provider.CLASSIFIER_PORT}},
                "rules": [
                    {"match": {"class": "simple"}, "targets": [{"external": provider.NAME}]},
                    {"targets": [{"deployment": model}]},
                ],
            },
        },
        {
            "apiVersion": API_VERSION,
            "kind": "LLMRoute",
            "metadata": {"name": "away", "namespace": namespace},
            "spec": {
                "models": ["overflowing"],
                "rules": [{"targets": [{"deployment": away}]}],
                "hold": {"maxSeconds": 0},
                "fallbacks": [{"external": provider.NAME, "onlyOn": ["Unavailable"]}],
            },
        },
    ]


def answered(url: str, name: str) -> httpx.Response | None:
    """A whole answer; None while there is another one."""
    answer = ask(url, name)
    return answer if answer.status_code == 200 else None


@pytest.mark.deep
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


@pytest.mark.deep
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
