"""status.adapters and AdaptersReady: what the pods say of the adapters that the spec names."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.operator import pods as kubelet
from quire_operator.reports import AdapterReport, Sample
from quire_operator.status import transitions
from tests.operator.status import objects
from tests.operator.status.objects import condition, deployment, model_body, pod

Body = dict[str, Any]

READY, FETCHING, LOADING = "Ready", "Fetching", "Loading"


def body(*names: str, **fields: Any) -> Body:
    hub = {"huggingFace": {"repo": "example/lora"}}
    listed = [{"name": name, "source": hub} for name in names]
    return model_body(engine={"maxAdapters": 2}, adapters=listed, **fields)


def of(name: str, state: str, **fields: Any) -> AdapterReport:
    return AdapterReport(name=name, state=state, **fields)


def compute(*pods: tuple[AdapterReport, ...] | None, of: Body, old: Body | None = None) -> Body:
    """`pods`: what each says, None where it has not been asked."""
    made = [pod(kubelet.ready(), name=f"m-{index}") for index in range(len(pods))]
    samples = {
        one["metadata"]["uid"]: Sample(phase="serving", adapters=said)
        for one, said in zip(made, pods, strict=True)
        if said is not None
    }
    counted = deployment(replicas=len(pods), ready=len(pods))
    return objects.compute(*made, of=counted, body=of, old=old, samples=samples)


def adapters(computed: Body) -> dict[str, Body]:
    return {entry["name"]: entry for entry in computed["adapters"]}


def message(computed: Body) -> str:
    (found,) = [c["message"] for c in computed["conditions"] if c["type"] == "AdaptersReady"]
    return str(found)


def test_without_adapters_status_says_nothing_of_them() -> None:
    computed = compute((), of=model_body())
    assert "adapters" not in computed
    assert "AdaptersReady" not in [c["type"] for c in computed["conditions"]]


def test_an_adapter_is_ready_when_all_pods_answer_with_it() -> None:
    said = (of("a", READY, revision="9216db57"),)
    computed = compute(said, said, of=body("a"))
    assert computed["adapters"] == [
        {"name": "a", "state": READY, "readyReplicas": 2, "replicas": 2, "revision": "9216db57"}
    ]
    assert condition(computed, "AdaptersReady") == ("True", "AllAdaptersReady")


@pytest.mark.parametrize(
    ("one", "other", "state"),
    [
        (READY, None, "Pending"),
        (READY, LOADING, LOADING),
        (LOADING, FETCHING, FETCHING),
        (LOADING, "Unloaded", "Unloaded"),
        ("Unloaded", "Failed", "Failed"),
    ],
)
def test_an_adapter_has_the_state_of_the_pod_that_is_furthest_behind(
    one: str, other: str | None, state: str
) -> None:
    computed = compute((of("a", one),), (of("a", other),) if other else (), of=body("a"))
    assert adapters(computed)["a"]["state"] == state
    assert condition(computed, "AdaptersReady")[0] == "False"


def test_progress_is_that_of_the_slowest_download_in_steps() -> None:
    said = [(of("a", FETCHING, loaded_bytes=part, total_bytes=100),) for part in (90, 47)]
    assert adapters(compute(*said, of=body("a")))["a"]["progress"] == "45%"


def test_pods_with_different_revisions_have_none_in_common() -> None:
    said = [(of("a", READY, revision=revision),) for revision in ("1", "2")]
    assert "revision" not in adapters(compute(*said, of=body("a")))["a"]


def test_a_broken_adapter_is_named_with_its_pod_and_the_model_stays_ready() -> None:
    broken = of("b", "Failed", message="its rank is 64, above 16")
    computed = compute((of("a", READY), broken), of=body("a", "b"))
    assert adapters(computed)["b"]["message"] == "pod m-0: its rank is 64, above 16"
    assert condition(computed, "AdaptersReady") == ("False", "AdapterFailed")
    assert "b: pod m-0: its rank is 64" in message(computed)
    assert "spec.adapters" in message(computed)
    assert condition(computed, "Ready")[0] == "True"
    assert computed["phase"] == "Serving"
    assert [event.reason for event in transitions.events({}, computed)] == ["AdapterFailed", "Ready"]


def test_an_adapter_that_an_admin_has_unloaded_is_said_to_be_with_its_pod() -> None:
    computed = compute((of("a", "Unloaded", message="It was unloaded."),), of=body("a"))
    assert adapters(computed)["a"]["message"] == "pod m-0: It was unloaded."
    assert condition(computed, "AdaptersReady") == ("False", "AdaptersPending")


def test_what_pods_say_of_adapters_that_the_spec_does_not_name_is_left_out() -> None:
    computed = compute((of("a", READY), of("other", "Failed")), of=body("a"))
    assert list(adapters(computed)) == ["a"]
    assert condition(computed, "AdaptersReady")[0] == "True"


def test_without_pods_it_is_unknown() -> None:
    computed = compute(of=body("a", suspend=True))
    assert condition(computed, "AdaptersReady") == ("Unknown", "NoPods")
    assert adapters(computed)["a"]["state"] == "Pending"


def test_a_restarted_operator_keeps_what_is_known_until_it_has_asked() -> None:
    before = compute((of("a", READY, revision="1"),), of=body("a"))
    after = compute(None, of=body("a", "b"), old=before)
    assert adapters(after)["a"] == adapters(before)["a"]
    assert adapters(after)["b"]["state"] == "Pending"
