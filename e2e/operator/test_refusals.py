"""What the API server rejects, the administrator forbids or another owner holds is reported with its remedy,
and recovers when the cause is removed.
"""

from __future__ import annotations

from functools import partial

import pytest

from e2e.api.client import RefusedError
from e2e.operator import pods
from e2e.operator.world import Body, World
from e2e.waiting import eventually

KEY = {"name": "s", "key": "k"}

pytestmark = [pytest.mark.api, pytest.mark.usefixtures("operator")]


@pytest.mark.parametrize(
    ("why", "reason"),
    [
        ("exceeded quota: none-left, requested: pods=1, used: pods=0", "QuotaExceeded"),
        ('violates PodSecurity "restricted:none-left": runAsNonRoot != true', "ApplyRejected"),
    ],
)
def test_rejected_pods_are_reported_without_their_generated_names(
    world: World, namespace: str, why: str, reason: str
) -> None:
    world.deploy(namespace, "m")
    eventually("the Deployment", lambda: world.get("Deployment", namespace, "m"))
    refusal = f'pods "m-5d8f-x2x" is forbidden: {why}'
    failed = pods.condition("ReplicaFailure", "True", reason="FailedCreate", message=refusal)

    world.patch("Deployment", namespace, "m", {"status": {"conditions": [failed]}}, status=True)

    ready = world.wait_condition(namespace, "m", "Ready", "False", reason)
    assert "none-left" in ready["message"] and "m-5d8f" not in ready["message"]
    assert world.condition(namespace, "m", "Stalled")["status"] == "False"


def test_causes_that_no_watch_reports_are_reported_and_recover_when_removed(
    world: World, namespace: str
) -> None:
    """A Service of another owner, a quota, a broken webhook. All in one test, because each retry takes its
    time.
    """
    theirs = {"metadata": {"name": "taken"}, "spec": {"selector": {"app": "theirs"}, "ports": [{"port": 80}]}}
    world.create("Service", namespace, theirs)
    crowded = world.namespace(f"{namespace}-q")
    quotas = f"/api/v1/namespaces/{crowded}/resourcequotas"
    hard = {"hard": {"count/configmaps": "0"}}
    world.client.request("POST", quotas, {"metadata": {"name": "no-maps"}, "spec": hard})
    used = {"status": hard | {"used": {"count/configmaps": "0"}}}
    world.client.request("PATCH", f"{quotas}/no-maps/status", used, "application/merge-patch+json")

    hooked = world.namespace(f"{namespace}-w")
    hooks = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
    world.client.request("POST", hooks, broken_webhook(hooked))
    eventually("the webhook is asked", lambda: is_refused(world, hooked))

    world.deploy(namespace, "taken")
    world.deploy(crowded, "m")
    world.deploy(hooked, "m")

    stalled = world.wait_condition(namespace, "taken", "Stalled", "True", "OwnershipConflict")
    assert "Service taken" in stalled["message"]
    assert world.condition(namespace, "taken", "Reconciling")["status"] == "False"
    assert world.read("Service", namespace, "taken")["spec"]["selector"] == {"app": "theirs"}
    world.wait_events(namespace, "taken", "OwnershipConflict")
    ready = world.wait_condition(crowded, "m", "Ready", "False", "QuotaExceeded")
    assert "no-maps" in ready["message"]
    ready = world.wait_condition(hooked, "m", "Ready", "False", "ApplyFailed")
    assert "broken.example.com" in ready["message"] and "webhook" in ready["message"]
    world.wait_events(hooked, "m", "ApplyFailed")
    assert world.condition(hooked, "m", "Stalled")["status"] == "False"

    world.delete("Service", namespace, "taken")
    world.client.request("DELETE", f"{quotas}/no-maps")
    world.client.request("DELETE", f"{hooks}/{hooked}")
    world.wait_condition(namespace, "taken", "Stalled", "False")
    assert world.has_children(namespace, "taken")
    for place in (crowded, hooked):
        eventually("all children", partial(world.has_children, place, "m"))
        world.wait_condition(place, "m", "Degraded", "False")


def test_a_rejected_child_is_stalled_until_the_spec_is_edited(world: World, namespace: str) -> None:
    term = {"matchExpressions": [{"key": "zone", "operator": "In"}]}
    affinity = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    }
    world.deploy(namespace, "m", scheduling={"affinity": affinity})

    stalled = world.wait_condition(namespace, "m", "Stalled", "True", "ApplyRejected")

    assert "values" in stalled["message"] and "operator" in stalled["message"]
    assert "correct the field" in stalled["message"].lower()
    assert world.get("Deployment", namespace, "m") is None
    assert world.get("Service", namespace, "m") is not None, "what is not refused is there"
    world.wait_events(namespace, "m", "ApplyRejected")

    world.patch("LLMDeployment", namespace, "m", {"spec": {"scheduling": {"affinity": None}}})
    world.wait_condition(namespace, "m", "Stalled", "False")
    assert world.has_children(namespace, "m")


def test_a_rollout_past_its_deadline_is_stalled_with_the_failure_of_its_pods(
    world: World, namespace: str
) -> None:
    world.deploy(namespace, "m")
    world.make_pod(namespace, "m", pods.waiting("ErrImagePull", "no such tag"))
    world.roll_out(namespace, "m", ready=0, replicas=1)
    world.wait_condition(namespace, "m", "Ready", "False", "ImagePullFailed")
    assert world.condition(namespace, "m", "Stalled")["status"] == "False"

    late = pods.condition("Progressing", "False", reason="ProgressDeadlineExceeded")
    world.patch("Deployment", namespace, "m", {"status": {"conditions": [late]}}, status=True)

    stalled = world.wait_condition(namespace, "m", "Stalled", "True", "ProgressDeadlineExceeded")
    assert "ImagePullFailed" in stalled["message"] and "no such tag" in stalled["message"]
    assert world.condition(namespace, "m", "Reconciling")["status"] == "False"
    world.wait_events(namespace, "m", "ImagePullFailed", "ProgressDeadlineExceeded")

    moving = pods.condition("Progressing", "True", reason="ReplicaSetUpdated")
    world.patch("Deployment", namespace, "m", {"status": {"conditions": [moving]}}, status=True)
    world.wait_condition(namespace, "m", "Stalled", "False")


def test_a_spec_that_the_operators_settings_forbid_is_stalled_until_it_is_edited(
    world: World, namespace: str
) -> None:
    world.deploy(namespace, "m", engine={"env": [{"name": "QUIRE_FAULT", "value": "crash_step"}]})

    stalled = world.wait_condition(namespace, "m", "Stalled", "True", "InvalidSpec")
    assert "spec.engine.env[0].name" in stalled["message"] and "allowFaults" in stalled["message"]
    assert world.get("Deployment", namespace, "m") is None
    assert world.status(namespace, "m")["observedGeneration"] == 1
    world.wait_events(namespace, "m", "InvalidSpec")

    world.patch("LLMDeployment", namespace, "m", {"spec": {"engine": {"env": None}}})
    world.wait_condition(namespace, "m", "Stalled", "False")
    assert world.status(namespace, "m")["observedGeneration"] == 2


def broken_webhook(namespace: str) -> Body:
    """Every new Service of `namespace` is sent to a webhook that does not answer."""
    service = {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["services"], "operations": ["CREATE"]}
    hook = {
        "name": "broken.example.com",
        "clientConfig": {"url": "https://127.0.0.1:1/"},
        "rules": [service],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    return {"metadata": {"name": namespace}, "webhooks": [hook]}


def is_refused(world: World, namespace: str) -> bool:
    probe = {"metadata": {"name": "probe"}, "spec": {"ports": [{"port": 80}]}}
    try:
        world.client.request("POST", f"/api/v1/namespaces/{namespace}/services?dryRun=All", probe)
    except RefusedError:
        return True
    return False


def test_a_claim_is_used_once_its_owner_has_labelled_it(world: World, namespace: str) -> None:
    source = {"huggingFace": {"repo": "org/model"}}
    cache = {"mode": "SharedPVC", "existingClaim": "theirs"}
    claim = {
        "metadata": {"name": "theirs"},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    world.create("PersistentVolumeClaim", namespace, claim)
    world.deploy(namespace, "m", model={"source": source}, cache=cache)

    ready = world.wait_condition(namespace, "m", "Ready", "False", "ReferenceRefused")
    assert "spec.cache.existingClaim: PersistentVolumeClaim theirs" in ready["message"]
    assert "kubectl label" in ready["message"]
    assert world.get("Service", namespace, "m") is None, "nothing is applied"
    world.wait_events(namespace, "m", "ReferenceRefused")

    labels = {"serving.quire.dev/referable": "true"}
    world.patch("PersistentVolumeClaim", namespace, "theirs", {"metadata": {"labels": labels}})
    eventually("the download", lambda: world.child("Job", namespace, "m"))


@pytest.mark.parametrize(
    ("source", "env", "refused"),
    [
        (
            {
                "huggingFace": {
                    "repo": "org/model",
                    "endpoint": "https://evil.example.net",
                    "tokenSecretRef": KEY,
                }
            },
            [],
            "spec.model.source.huggingFace.endpoint: 'evil.example.net'",
        ),
        (
            {
                "s3": {
                    "uri": "s3://models/m",
                    "endpoint": "http://evil.example.net",
                    "credentialsSecretRef": {"name": "s"},
                }
            },
            [],
            "spec.model.source.s3.endpoint: 'evil.example.net'",
        ),
        (
            {"gcs": {"uri": "gs://models/m", "credentialsSecretRef": KEY}},
            [{"name": "https_proxy", "value": "evil.example.net:3128"}],
            "spec.cache.download.env[0].value: 'evil.example.net'",
        ),
    ],
)
def test_credentials_of_a_secret_go_to_no_host_that_the_administrator_does_not_trust(
    world: World, namespace: str, source: Body, env: list[Body], refused: str
) -> None:
    cache = {"mode": "None", "size": "1Gi", "download": {"env": env}}
    world.deploy(namespace, "m", model={"source": source}, cache=cache)

    stalled = world.wait_condition(namespace, "m", "Stalled", "True", "InvalidSpec")

    assert refused in stalled["message"] and "credentialHosts" in stalled["message"]
    assert world.get("Deployment", namespace, "m") is None
