"""Story: a model of a hub or a bucket is downloaded by a pod or by a Job for all pods, verified and served.

The credentials are in the download container only. A killed Job resumes; a corrupt file is downloaded again.
"""

from __future__ import annotations

import hashlib
import json
import random
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from e2e.cluster import programs
from e2e.kubectl import Kubectl, Manifest
from e2e.stories import model_sources
from e2e.stories.conftest import ROOT
from e2e.stories.deployment import SERVED_NAME, LLMDeployment
from e2e.stories.release import OperatorRelease
from e2e.stories.waiting import eventually
from e2e.up.place import Place
from e2e.up.volume import SPARE, Volumes

OF_HUB: Manifest = {
    "mode": "None",
    "size": "1Gi",
    "download": {"caBundleConfigMapRef": {"name": model_sources.CA_BUNDLE}},
}


def hub_model(namespace: str, key: str = "token", repository: str = "org/smollm2") -> Manifest:
    return {
        "source": {
            "huggingFace": {
                "repo": repository,
                "revision": "main",
                "endpoint": model_sources.service_url(model_sources.HUB, namespace, "https"),
                "tokenSecretRef": {"name": model_sources.HUB, "key": key},
            }
        },
        "servedName": SERVED_NAME,
    }


@pytest.fixture(scope="module")
def token(
    kube: Kubectl, namespace: str, operator: OperatorRelease, tmp_path_factory: pytest.TempPathFactory
) -> str:
    """Starts the fake hub; its token."""
    token, directory = f"hf-{secrets.token_hex(16)}", tmp_path_factory.mktemp("hub")
    model_sources.apply_and_wait(
        kube, *model_sources.hub_manifests(namespace, operator.engine_image(), token, directory)
    )
    return token


@pytest.fixture
def bucket(
    kube: Kubectl, namespace: str, operator: OperatorRelease, volumes: Volumes, tmp_path: Path
) -> Iterator[str]:
    """Starts an S3 store with the model in its bucket `models`; its secret key."""
    programs.build(ROOT / ".cluster" / "bin", (model_sources.STORE,))
    shutil.copy(ROOT / ".cluster" / "bin" / model_sources.STORE, tmp_path)
    secret = secrets.token_hex(16)
    volumes.provide(tmp_path, namespace, model_sources.STORE)
    model_sources.apply_and_wait(
        kube, *model_sources.store_manifests(namespace, operator.engine_image(), secret)
    )
    yield secret
    volumes.remove(namespace, model_sources.STORE)


def test_a_model_of_a_hub_is_downloaded_and_served_and_only_the_downloader_has_the_token(
    kube: Kubectl, place: Place, namespace: str, token: str, deploy: Callable[..., LLMDeployment]
) -> None:
    llm = deploy("fetched", model=hub_model(namespace), cache=OF_HUB)
    eventually("it downloads", lambda: llm.status().get("phase") == "Downloading", poll=0.2)
    llm.wait_ready()
    with llm.client() as client:
        answer = client.completions.create(model=SERVED_NAME, prompt="Once upon a time", max_tokens=8)

    assert answer.choices[0].text.strip()
    files = {file["name"]: file["sha256"] for file in llm.status()["model"]["files"]}
    for name in ("config.json", "model.safetensors"):
        assert files[name] == hashlib.sha256((place.model / name).read_bytes()).hexdigest()

    (pod,) = llm.pods()
    (server,) = pod["spec"]["containers"]
    (fetcher,) = pod["spec"]["initContainers"]
    assert "tokenSecretRef" not in json.dumps(server) and "HF_TOKEN" not in json.dumps(server)
    assert "HF_TOKEN" in json.dumps(fetcher)
    output = [
        kube.run("get", "llmdeployments,pods,configmaps,events", "-n", namespace, "-o", "json"),
        kube.run("logs", "-n", namespace, pod["metadata"]["name"], "--all-containers"),
    ]
    assert all(token not in text for text in output)


@pytest.mark.deep
def test_a_refused_token_is_reported_and_a_corrected_one_works(
    kube: Kubectl, namespace: str, token: str, deploy: Callable[..., LLMDeployment]
) -> None:
    wrong = {"namespace": namespace, "name": model_sources.HUB}
    kube.apply(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": wrong,
            "stringData": {"token": token, "old": "hf-revoked"},
        }
    )
    llm = deploy("denied", model=hub_model(namespace, key="old"), cache=OF_HUB)
    failure = llm.wait_failure("ModelAccessDenied")

    assert (failure["container"], failure["exitCode"]) == ("fetch", 77)
    assert "hf-revoked" not in json.dumps(llm.status())
    llm.patch({"model": hub_model(namespace)})
    llm.wait_ready()


@pytest.mark.deep
def test_a_model_in_a_bucket_is_downloaded_and_served_and_only_the_downloader_has_the_key(
    kube: Kubectl, place: Place, namespace: str, bucket: str, deploy: Callable[..., LLMDeployment]
) -> None:
    of_bucket = {
        "uri": "s3://models/smollm2",
        "endpoint": model_sources.service_url(model_sources.STORE, namespace),
        "region": "us-east-1",
        "credentialsSecretRef": {"name": model_sources.STORE},
    }
    model = {"source": {"s3": of_bucket}, "servedName": SERVED_NAME}
    llm = deploy("bucket", model=model, cache={"mode": "None", "size": "1Gi"})
    llm.wait_ready()
    with llm.client() as client:
        answer = client.completions.create(model=SERVED_NAME, prompt="Once upon a time", max_tokens=8)

    assert answer.choices[0].text.strip()
    files = {file["name"]: file["sha256"] for file in llm.status()["model"]["files"]}
    weights = (place.model / "model.safetensors").read_bytes()
    assert files["model.safetensors"] == hashlib.sha256(weights).hexdigest()
    (pod,) = llm.pods()
    output = [
        kube.run("get", "llmdeployments,pods,configmaps,events", "-n", namespace, "-o", "json"),
        kube.run("logs", "-n", namespace, pod["metadata"]["name"], "--all-containers"),
    ]
    assert all(bucket not in text for text in output)


ROLE = "serving.quire.dev/role"
KILLS = 2
# Flips one bit in the middle of the largest file of the model.
CORRUPT = """
import pathlib
path = max(pathlib.Path("/models").glob("model-*/*"), key=lambda path: path.stat().st_size)
with path.open("r+b") as file:
    file.seek(path.stat().st_size // 2)
    byte = file.read(1)[0]
    file.seek(-1, 1)
    file.write(bytes([byte ^ 1]))
"""


@pytest.fixture
def spare(volumes: Volumes, namespace: str) -> Iterator[Manifest]:
    """The cache fields with which a second claim of this namespace is bound."""
    yield volumes.spare(namespace)
    volumes.remove(namespace, SPARE)


def running_fetcher(llm: LLMDeployment) -> Manifest | None:
    """The pod of the download Job, if it is running."""
    pods = [pod for pod in llm.pods() if pod["metadata"]["labels"][ROLE] == "fetcher"]
    return next((pod for pod in pods if pod["status"].get("phase") == "Running"), None)


def fetched_bytes(kube: Kubectl, pod: Manifest) -> int:
    """Bytes that the fetcher has written so far, from its log."""
    log = kube.run("logs", "-n", pod["metadata"]["namespace"], pod["metadata"]["name"])
    entries = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    return max((int(entry.get("loadedBytes", 0)) for entry in entries), default=0)


def run_python_on_claim(kube: Kubectl, namespace: str, image: str, claim: str, code: str) -> None:
    """Runs `code` in a pod that mounts the claim writable, and waits until it ends."""
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    container = {
        "name": "corrupt",
        "image": image,
        "command": ["/opt/quire/bin/python", "-c", code],
        "volumeMounts": [{"name": "model", "mountPath": "/models"}],
        "securityContext": security,
    }
    user = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    pod = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": user,
        "containers": [container],
        "volumes": [{"name": "model", "persistentVolumeClaim": {"claimName": claim}}],
    }
    metadata = {"namespace": namespace, "name": "corrupt"}
    kube.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod})
    done = "--for=jsonpath={.status.phase}=Succeeded"
    kube.run("wait", "pod", "corrupt", "-n", namespace, done, "--timeout=120s")
    kube.delete("pod", "corrupt", namespace)


@pytest.mark.deep
def test_a_killed_download_job_resumes_and_a_corrupt_file_is_downloaded_again(
    kube: Kubectl,
    place: Place,
    namespace: str,
    token: str,
    operator: OperatorRelease,
    spare: Manifest,
    deploy: Callable[..., LLMDeployment],
) -> None:
    replicas = 2 if spare["accessMode"] == "ReadWriteMany" else 1
    cache = {**OF_HUB, "mode": "SharedPVC", **spare}
    model = hub_model(namespace, repository="org/slow")
    llm = deploy("shared", model=model, cache=cache, replicas=replicas)
    size = (place.model / "model.safetensors").stat().st_size
    for part in range(1, KILLS + 1):
        pod = eventually("the Job's pod", lambda: running_fetcher(llm))
        enough = int(size * (part - random.random()) / (KILLS + 1))
        eventually(
            "a part of the weights is there",
            lambda pod=pod, enough=enough: fetched_bytes(kube, pod) > enough,  # type: ignore[misc]
            timeout=60,
        )
        assert kube.get("deployments", "shared", namespace) is None
        name = pod["metadata"]["name"]
        assert fetched_bytes(kube, pod) < size, "the download ended before the kill"
        kube.run("delete", "pod", name, "-n", namespace, "--grace-period=0", "--force")
        assert kube.get("pods", name, namespace) is None, "it was not killed"
    llm.wait_ready()
    with llm.client() as client:
        answer = client.completions.create(model=SERVED_NAME, prompt="Once upon a time", max_tokens=8)
    assert answer.choices[0].text.strip()
    files = {file["name"]: file["sha256"] for file in llm.status()["model"]["files"]}
    for name in ("config.json", "model.safetensors"):
        assert files[name] == hashlib.sha256((place.model / name).read_bytes()).hexdigest()

    (claim,) = kube.list("persistentvolumeclaims", namespace, "serving.quire.dev/name=shared")
    run_python_on_claim(kube, namespace, operator.engine_image(), claim["metadata"]["name"], CORRUPT)
    kube.run("delete", "pod", llm.ready_pods()[0]["metadata"]["name"], "-n", namespace, "--wait=false")
    llm.wait_failure("ModelCorrupt")
    eventually(
        "all pods serve the repaired model",
        lambda: (
            llm.status().get("readyReplicas") == replicas
            and llm.condition("ModelCached")["status"] == "True"
            and llm.condition("Degraded")["status"] == "False"
        ),
        timeout=240,
    )

    output = [
        kube.run("get", "llmdeployments,pods,jobs,configmaps,events", "-n", namespace, "-o", "json"),
        kube.run("logs", "-n", namespace, "--selector=serving.quire.dev/name=shared", "--tail=-1"),
    ]
    assert '"reason": "Fetched"' in output[1]
    assert all(token not in text for text in output)
