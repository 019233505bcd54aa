"""Story: restricted pods, API keys, an operator that cannot read Secrets, and no shell injection."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable

import openai
import pytest

from e2e.kubectl import Kubectl, KubectlError
from e2e.stories.deployment import SERVED_NAME, LLMDeployment, small_spec
from e2e.stories.release import NAMESPACE, USER, OperatorRelease
from e2e.stories.waiting import eventually

HOSTILE = "x$(touch /tmp/pwned)`touch /tmp/pwned`;touch /tmp/pwned|'\"&&touch /tmp/pwned"


def test_pod_security_restricted_is_enforced_where_the_pods_run(kube: Kubectl, namespace: str) -> None:
    root = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "root", "namespace": namespace},
        "spec": {"containers": [{"name": "c", "image": "any", "securityContext": {"privileged": True}}]},
    }
    with pytest.raises(KubectlError, match="violates PodSecurity"):
        kube.apply(root)
    labels = kube.run("get", "namespace", NAMESPACE, "-o", "jsonpath={.metadata.labels}")
    assert '"pod-security.kubernetes.io/enforce":"restricted"' in labels


def test_a_request_needs_a_key_and_a_new_key_works_without_a_restart_as_its_entry_says(
    kube: Kubectl, namespace: str, deploy: Callable[..., LLMDeployment]
) -> None:
    def secret(**keys: str) -> dict[str, object]:
        data = {client: base64.b64encode(key.encode()).decode() for client, key in keys.items()}
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "keys", "namespace": namespace},
            "data": data,
        }

    kube.apply(secret(alice="alice-s-key"))
    llm = deploy("keys", security={"apiKeysSecretRef": {"name": "keys"}})
    llm.wait_ready()

    with llm.client("wrong") as stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with llm.client("alice-s-key") as alice:
        assert alice.models.list().data[0].id == SERVED_NAME

    kube.apply(secret(alice="alice-s-key", bob="bob-s-key\nadmin: true\n"))

    def bob_may() -> bool:
        with llm.client("bob-s-key") as bob:
            try:
                return bool(bob.models.list().data)
            except openai.AuthenticationError:
                return False

    eventually("the added key works", bob_may, poll=1.0)
    root = llm.base_url.removesuffix("/v1")
    with llm.client("alice-s-key", root) as alice, pytest.raises(openai.PermissionDeniedError):
        alice.post("/reset_prefix_cache", cast_to=object)
    with llm.client("bob-s-key", root) as bob:
        bob.post("/reset_prefix_cache", cast_to=object)
    described = llm.describe_pods() + kube.run("logs", "-n", namespace, llm.pods()[0]["metadata"]["name"])
    assert "alice-s-key" not in described
    assert all(c["restartCount"] == 0 for pod in llm.pods() for c in pod["status"]["containerStatuses"])


def test_the_operator_may_not_read_a_secret(kube: Kubectl, operator: OperatorRelease, namespace: str) -> None:
    for verb in ("get", "list", "watch", "create", "update", "patch", "delete"):
        for where in (namespace, NAMESPACE, "kube-system"):
            with pytest.raises(KubectlError, match="^kubectl .*: no$"):
                kube.run("auth", "can-i", verb, "secrets", "-n", where, f"--as={USER}")


def test_shell_text_in_every_string_field_runs_nothing(
    kube: Kubectl, namespace: str, deploy: Callable[..., LLMDeployment]
) -> None:
    hostile = {
        "model": {
            "source": {"pvc": {"claimName": "smollm2"}},
            "servedName": HOSTILE,
            "aliases": [HOSTILE + "2"],
        },
        "engine": {**small_spec()["engine"], "env": [{"name": "OTEL_SERVICE_NAME", "value": HOSTILE}]},
        "rollout": {"restartId": HOSTILE},
        "networking": {"service": {"annotations": {"note": HOSTILE}}},
    }
    accepted = {
        field: value for field, value in hostile.items() if is_admitted(kube, namespace, {field: value})
    }
    assert {"engine", "networking"} <= set(accepted)
    llm = deploy("hostile", **accepted)
    llm.wait_ready()
    (pod,) = llm.pods()
    name = pod["metadata"]["name"]

    assert (
        kube.run("exec", "-n", namespace, name, "--", "printenv", "OTEL_SERVICE_NAME").rstrip("\n") == HOSTILE
    )
    assert "pwned" not in kube.run("exec", "-n", namespace, name, "--", "ls", "-A", "/tmp")


def test_shell_text_in_an_extra_argument_is_refused_by_the_flag_parser(
    deploy: Callable[..., LLMDeployment],
) -> None:
    llm = deploy("argument", engine={**small_spec()["engine"], "extraArgs": ["--log-level=" + HOSTILE]})

    failure = llm.wait_failure("ConfigError")

    assert "--log-level" in failure["message"]


def is_admitted(kube: Kubectl, namespace: str, changes: dict[str, object]) -> bool:
    """True when the API server accepts a spec with these changes."""
    body = {
        "apiVersion": "serving.quire.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "hostile", "namespace": namespace},
        "spec": small_spec(**changes),
    }
    try:
        kube.run("apply", "--dry-run=server", "-f", "-", stdin=json.dumps(body))
    except KubectlError as error:
        assert "Invalid value" in str(error) or "should match" in str(error)
        return False
    return True
