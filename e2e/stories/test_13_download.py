"""Story 13: a model from a hub or a bucket is downloaded, by its pod or by a Job for all pods, checked and
served, and what opens it is nowhere else. A killed Job goes on; a file that rots is fetched again.
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
from e2e.stories import origins
from e2e.stories.conftest import ROOT
from e2e.stories.deployment import SERVED_NAME, LLMDeployment
from e2e.stories.release import OperatorRelease
from e2e.stories.waiting import eventually
from e2e.up.place import Place
from e2e.up.volume import SPARE, Volumes


def source(namespace: str, key: str = "token", repository: str = "org/smollm2") -> Manifest:
    return {
        "source": {
            "huggingFace": {
                "repo": repository,
                "revision": "main",
                "endpoint": origins.address(origins.HUB, namespace),
                "tokenSecretRef": {"name": origins.HUB, "key": key},
            }
        },
        "servedName": SERVED_NAME,
    }


@pytest.fixture(scope="module")
def token(kube: Kubectl, namespace: str, operator: OperatorRelease) -> str:
    """The token of a hub that runs."""
    token = f"hf-{secrets.token_hex(16)}"
    origins.run(kube, *origins.hub(namespace, operator.engine_image(), token))
    return token


@pytest.fixture
def bucket(
    kube: Kubectl, namespace: str, operator: OperatorRelease, volumes: Volumes, tmp_path: Path
) -> Iterator[str]:
    """The secret key of a store with the model in its bucket `models`."""
    programs.build(ROOT / ".cluster" / "bin", (origins.STORE,))
    shutil.copy(ROOT / ".cluster" / "bin" / origins.STORE, tmp_path)
    secret = secrets.token_hex(16)
    volumes.provide(tmp_path, namespace, origins.STORE)
    origins.run(kube, *origins.store(namespace, operator.engine_image(), secret))
    yield secret
    volumes.remove(namespace, origins.STORE)


def test_a_model_of_a_hub_is_downloaded_checked_and_served_and_its_token_stays_with_the_download(
    kube: Kubectl, place: Place, namespace: str, token: str, deploy: Callable[..., LLMDeployment]
) -> None:
    llm = deploy("fetched", model=source(namespace), cache={"mode": "None", "size": "1Gi"})
    eventually("it downloads", lambda: llm.status().get("phase") == "Downloading", timeout=60, poll=0.2)
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
    told = [
        kube.run("get", "llmdeployments,pods,configmaps,events", "-n", namespace, "-o", "json"),
        kube.run("logs", "-n", namespace, pod["metadata"]["name"], "--all-containers"),
    ]
    assert all(token not in text for text in told)


def test_a_token_that_is_refused_is_said_and_the_right_one_helps(
    kube: Kubectl, namespace: str, token: str, deploy: Callable[..., LLMDeployment]
) -> None:
    wrong = {"namespace": namespace, "name": origins.HUB}
    kube.apply(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": wrong,
            "stringData": {"token": token, "old": "hf-revoked"},
        }
    )
    llm = deploy("denied", model=source(namespace, key="old"), cache={"mode": "None", "size": "1Gi"})
    failure = llm.wait_failure("ModelAccessDenied")

    assert (failure["container"], failure["exitCode"]) == ("fetch", 77)
    assert "hf-revoked" not in json.dumps(llm.status())
    llm.patch({"model": source(namespace)})
    llm.wait_ready()


def test_a_model_in_a_bucket_is_downloaded_checked_and_served_and_its_key_stays_with_the_download(
    kube: Kubectl, place: Place, namespace: str, bucket: str, deploy: Callable[..., LLMDeployment]
) -> None:
    of_bucket = {
        "uri": "s3://models/smollm2",
        "endpoint": origins.address(origins.STORE, namespace),
        "region": "us-east-1",
        "credentialsSecretRef": {"name": origins.STORE},
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
    told = [
        kube.run("get", "llmdeployments,pods,configmaps,events", "-n", namespace, "-o", "json"),
        kube.run("logs", "-n", namespace, pod["metadata"]["name"], "--all-containers"),
    ]
    assert all(bucket not in text for text in told)


ROLE = "serving.quire.dev/role"
KILLS = 2
# One byte in the middle of the largest file below the directory.
ROT = """
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
    """What a claim of this namespace may ask for."""
    yield volumes.spare(namespace)
    volumes.remove(namespace, SPARE)


def fetcher(llm: LLMDeployment) -> Manifest | None:
    """The Job's pod, when it runs."""
    pods = [pod for pod in llm.pods() if pod["metadata"]["labels"][ROLE] == "fetcher"]
    return next((pod for pod in pods if pod["status"].get("phase") == "Running"), None)


def loaded(kube: Kubectl, pod: Manifest) -> int:
    """Bytes that a fetcher has on the disk, by its log."""
    log = kube.run("logs", "-n", pod["metadata"]["namespace"], pod["metadata"]["name"])
    told = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    return max((int(entry.get("loadedBytes", 0)) for entry in told), default=0)


def run_beside(kube: Kubectl, namespace: str, image: str, claim: str, code: str) -> None:
    """Python in a pod that may write to the claim."""
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    container = {
        "name": "rot",
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
    about = {"namespace": namespace, "name": "rot"}
    kube.apply({"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": pod})
    done = "--for=jsonpath={.status.phase}=Succeeded"
    kube.run("wait", "pod", "rot", "-n", namespace, done, "--timeout=120s")
    kube.delete("pod", "rot", namespace)


def test_a_job_brings_the_model_for_all_pods_however_often_it_is_killed_and_mends_it_when_it_rots(
    kube: Kubectl,
    place: Place,
    namespace: str,
    token: str,
    operator: OperatorRelease,
    spare: Manifest,
    deploy: Callable[..., LLMDeployment],
) -> None:
    replicas = 2 if spare["accessMode"] == "ReadWriteMany" else 1
    cache = {"mode": "SharedPVC", "size": "1Gi", **spare}
    model = source(namespace, repository="org/slow")
    llm = deploy("shared", model=model, cache=cache, replicas=replicas)
    size = (place.model / "model.safetensors").stat().st_size
    for part in range(1, KILLS + 1):
        pod = eventually("the Job's pod", lambda: fetcher(llm), timeout=120)
        enough = int(size * (part - random.random()) / (KILLS + 1))
        eventually("a part", lambda pod=pod, enough=enough: loaded(kube, pod) > enough, timeout=60)  # type: ignore[misc]
        assert kube.get("deployment", "shared", namespace) is None
        kube.run("delete", "pod", pod["metadata"]["name"], "-n", namespace, "--grace-period=0", "--force")
    llm.wait_ready()
    with llm.client() as client:
        answer = client.completions.create(model=SERVED_NAME, prompt="Once upon a time", max_tokens=8)
    assert answer.choices[0].text.strip()
    files = {file["name"]: file["sha256"] for file in llm.status()["model"]["files"]}
    for name in ("config.json", "model.safetensors"):
        assert files[name] == hashlib.sha256((place.model / name).read_bytes()).hexdigest()

    (claim,) = kube.list("persistentvolumeclaims", namespace, "serving.quire.dev/name=shared")
    run_beside(kube, namespace, operator.engine_image(), claim["metadata"]["name"], ROT)
    kube.run("delete", "pod", llm.ready_pods()[0]["metadata"]["name"], "-n", namespace, "--wait=false")
    llm.wait_failure("ModelCorrupt")
    eventually(
        "all pods serve the mended model",
        lambda: (
            llm.status().get("readyReplicas") == replicas
            and llm.condition("ModelCached")["status"] == "True"
            and llm.condition("Degraded")["status"] == "False"
        ),
        timeout=240,
    )

    told = [
        kube.run("get", "llmdeployments,pods,jobs,configmaps,events", "-n", namespace, "-o", "json"),
        kube.run("logs", "-n", namespace, "--selector=serving.quire.dev/name=shared", "--tail=-1"),
    ]
    assert '"reason": "Fetched"' in told[1]
    assert all(token not in text for text in told)
