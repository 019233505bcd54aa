"""Responses of the API: the sum over the ready pods, or an error, and never 0 for an unknown value."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import pytest

from e2e.metrics_adapter.cluster import VERSIONS, Cluster, path
from e2e.metrics_adapter.engines import (
    POD_SPEC,
    Answer,
    make_pod,
    says,
    serving,
    set_ready,
    unreachable_address,
)
from e2e.metrics_adapter.replica import AdapterReplica
from e2e.operator.world import PATHS
from e2e.waiting import eventually
from quire_metrics_adapter.scraper import PERIOD_SECONDS

pytestmark = [pytest.mark.api, pytest.mark.usefixtures("adapter")]


DEPTH = 1200  # Python's decoder reads no more than about 1,000


def hang() -> tuple[int, bytes]:
    time.sleep(3)
    return says(queue=1)()


INVALID_RESPONSES: dict[str, Answer] = {
    "not a number": says(queue="NaN"),
    "infinite": says(queue="+Inf"),
    "negative": says(queue=-5),
    "beyond reason": says(queue="1e300"),
    "no metrics": lambda: (200, b"hello\n"),
    "endless": lambda: (200, b"# x\n" * 1_000_000),
    "an error page": lambda: (500, says(queue=1)()[1]),
    "sent elsewhere": lambda: (302, says(queue=1)()[1]),
    "too late": hang,
}


def test_kubectl_gets_the_sum_over_the_ready_pods_in_both_versions(cluster: Cluster, namespace: str) -> None:
    cluster.engine(namespace, "chat", says(queue=7, running=2, kv=0.5))
    cluster.engine(namespace, "chat", says(queue=5, running=1, kv=0.25))
    cluster.engine(namespace, "other", says(queue=100))
    loading = make_pod(cluster.world, namespace, "chat", unreachable_address(), ready=False)
    cluster.wait_value(namespace, "chat", "12")

    for version in VERSIONS:
        done = cluster.kubectl("get", "--raw", path(namespace, "chat", version=version))
        assert (done.returncode, done.stderr) == (0, "")
        (item,) = json.loads(done.stdout)["items"]
        assert item["value"] == "12"
        assert item["describedObject"] == {
            "kind": "LLMDeployment",
            "namespace": namespace,
            "name": "chat",
            "apiVersion": "serving.quire.dev/v1alpha1",
        }
    assert cluster.value(namespace, "chat", "llm_running_requests") == "3"
    assert cluster.value(namespace, "chat", "llm_kv_cache_utilization") == "750m"
    assert "no believable llm_gpu_utilization" in cluster.value(namespace, "chat", "llm_gpu_utilization")
    assert cluster.world.get("Pod", namespace, loading)


def test_a_pod_that_only_carries_the_labels_changes_no_value(cluster: Cluster, namespace: str) -> None:
    cluster.engine(namespace, "chat", says(queue=7))
    cluster.engine(namespace, "other", says(queue=1))
    with serving(cluster.engine_port, says(queue=100_000)) as liar:
        labels = {"serving.quire.dev/name": "chat", "serving.quire.dev/role": "leader"}
        cluster.world.create(
            "Pod", namespace, {"metadata": {"name": "liar", "labels": labels}, "spec": POD_SPEC}
        )
        set_ready(cluster.world, namespace, "liar", liar.ip, ready=True)
        # One that came after it is seen, so it was seen as well.
        cluster.engine(namespace, "chat", says(queue=3))
        cluster.wait_value(namespace, "chat", "10")
    assert cluster.value(namespace, "other") == "1"


@pytest.mark.parametrize("kind", ["Pod", "ReplicaSet"])
def test_an_object_that_cannot_be_decoded_costs_itself_alone(
    cluster: Cluster, namespace: str, kind: str, start: Callable[..., AdapterReplica]
) -> None:
    """Anyone may give an object managed fields, which have no schema, and a label."""
    labels = {"serving.quire.dev/name": "chat", "serving.quire.dev/role": "leader"}
    template = {"metadata": {"labels": labels}, "spec": POD_SPEC}
    spec = POD_SPEC if kind == "Pod" else {"selector": {"matchLabels": labels}, "template": template}
    fields = {
        "manager": "me",
        "operation": "Update",
        "apiVersion": "v1" if kind == "Pod" else "apps/v1",
        "time": "2026-01-01T00:00:00Z",
        "fieldsType": "FieldsV1",
        "fieldsV1": "DEEP",
    }
    cluster.engine(namespace, "chat", says(queue=7))
    hostile = {"metadata": {"name": "deep", "labels": labels, "managedFields": [fields]}, "spec": spec}
    document = json.dumps(hostile).replace('"DEEP"', '{"f:a":' * DEPTH + "{}" + "}" * DEPTH)
    assert cluster.world.client.send("POST", PATHS[kind].format(namespace), document.encode()) == 201
    text = cluster.kubectl("get", kind, "deep", "-n", namespace, "-o", "json", "--show-managed-fields").stdout
    assert text.count('"f:a"') == DEPTH, "the API server took it"

    cluster.engine(namespace, "chat", says(queue=5))
    cluster.wait_value(namespace, "chat", "12")
    another = start("another").wait_ready()  # its first list has it
    path, both = f"/load/{namespace}/chat/llm_queue_depth", (200, '{"llm_queue_depth": 12.0}')
    eventually("it has asked both engines", lambda: another.ask(path) == both)
    assert "cannot be read in full" in another.log.read_text()
    cluster.world.client.send("DELETE", f"{PATHS[kind].format(namespace)}/deep")


def test_keda_gets_the_same_values_and_never_0_for_an_unknown_value(
    cluster: Cluster, adapter: AdapterReplica, namespace: str
) -> None:
    cluster.engine(namespace, "chat", says(queue=7, kv=0.5))
    make_pod(cluster.world, namespace, "loading", unreachable_address(), ready=False)
    cluster.wait_value(namespace, "chat", "7")

    def load(path: str) -> tuple[int, str]:
        return adapter.ask(f"/load/{namespace}/{path}")

    assert load("chat/llm_queue_depth") == (200, '{"llm_queue_depth": 7.0}')
    assert load("chat/llm_kv_cache_utilization?ifNone=0") == (200, '{"llm_kv_cache_utilization": 0.5}')
    assert load("asleep/llm_queue_depth?ifNone=0") == (200, '{"llm_queue_depth": 0}')
    assert [load(f"{name}/llm_queue_depth")[0] for name in ("asleep", "loading", "loading")] == [404] * 3
    eventually("its pod is seen", lambda: load("loading/llm_queue_depth?ifNone=0")[0] == 404)


def test_a_pod_that_becomes_ready_counts_before_the_next_scrape(cluster: Cluster, namespace: str) -> None:
    """Waiting for the next would blind the autoscaler with each new pod."""
    took = []
    for number in range(1, 6):
        became_ready_at = time.monotonic()
        cluster.engine(namespace, "chat", says(queue=1))
        cluster.wait_value(namespace, "chat", str(number))
        took.append(time.monotonic() - became_ready_at)

    # Without it each pod would wait for the next scrape, and all but the first for a whole period.
    assert statistics.median(took) < PERIOD_SECONDS / 2


def test_a_value_follows_the_metrics_of_the_pods(cluster: Cluster, namespace: str) -> None:
    engine = cluster.engine(namespace, "chat", says(queue=7))
    cluster.wait_value(namespace, "chat", "7")
    engine.answer = says(queue=0)
    cluster.wait_value(namespace, "chat", "0")


def test_an_unreachable_ready_pod_makes_the_value_an_error_until_it_is_unready(
    cluster: Cluster, namespace: str
) -> None:
    cluster.engine(namespace, "chat", says(queue=7))
    cluster.wait_value(namespace, "chat", "7")
    silent = unreachable_address()
    name = make_pod(cluster.world, namespace, "chat", silent)

    cluster.wait_refusal(namespace, "chat", "1 of 2 ready pods did not answer within 15 s")
    set_ready(cluster.world, namespace, name, silent, ready=False)
    cluster.wait_value(namespace, "chat", "7")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", INVALID_RESPONSES)
def test_an_invalid_response_of_a_pod_makes_only_its_llmdeployments_value_unknown(
    cluster: Cluster, namespace: str, name: str
) -> None:
    invalid = cluster.engine(namespace, "chat", INVALID_RESPONSES[name])
    cluster.engine(namespace, "chat", says(queue=1))
    cluster.engine(namespace, "honest", says(queue=3))

    cluster.wait_value(namespace, "honest", "3")
    eventually("the pod was asked", lambda: invalid.asked)
    assert "1 of 2 ready pods" in cluster.value(namespace, "chat")
    invalid.answer = says(queue=1)
    cluster.wait_value(namespace, "chat", "2")


def test_a_stale_value_becomes_an_error_and_never_0(cluster: Cluster, namespace: str) -> None:
    engine = cluster.engine(namespace, "chat", says(queue=7))
    cluster.wait_value(namespace, "chat", "7")
    engine.answer = lambda: (503, b"")

    seen = set()

    def is_refused() -> bool:
        seen.add(cluster.value(namespace, "chat"))
        return any("did not answer within 15 s" in one for one in seen)

    eventually("it is too old", is_refused, poll=0.5)
    assert {one for one in seen if one.isdigit()} == {"7"}


def test_missing_pods_objects_and_metrics_have_no_value(cluster: Cluster, namespace: str) -> None:
    make_pod(cluster.world, namespace, "loading", unreachable_address(), ready=False)

    assert "no pod of it is ready" in cluster.value(namespace, "loading")
    assert "no pod of it is ready" in cluster.value(namespace, "absent")
    assert "no such metric" in cluster.value(namespace, "absent", "llm_secrets")


def test_values_are_listed_for_a_whole_namespace_and_by_label_selector(
    cluster: Cluster, namespace: str
) -> None:
    for name, queue in (("chat", 1), ("code", 2), ("dark", 3)):
        cluster.world.deploy(namespace, name)
        cluster.world.patch("LLMDeployment", namespace, name, {"metadata": {"labels": {"team": name}}})
        if name != "dark":
            cluster.engine(namespace, name, says(queue=queue))
            cluster.wait_value(namespace, name, str(queue))

    def found(query: str = "") -> dict[str, str]:
        items = cluster.items(namespace, "*", "llm_queue_depth", query)
        return {item["describedObject"]["name"]: item["value"] for item in items}

    assert found() == {"chat": "1", "code": "2"}, "what has no value is not in the list"
    assert found("?labelSelector=team%3Dcode") == {"code": "2"}
    assert found("?labelSelector=team%20in%20(chat,dark)") == {"chat": "1"}
    with pytest.raises(Exception, match="labelSelector"):
        found("?labelSelector=!!")
