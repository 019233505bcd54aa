"""Which canary's tokens are kept, and that nothing is written while they stay the same."""

from __future__ import annotations

import copy
import json
from typing import Any

from e2e.operator import pods as kubelet
from quire_operator import names, resources, spec
from quire_operator.observed import Observed, Ref
from quire_operator.plan import golden_tokens
from quire_operator.reports import MAX_GOLDEN_TOKENS, Canary, Sample
from quire_operator.settings import Settings
from tests.operator.plan.planning import plan_of
from tests.operator.status.objects import model_body, pod

CONFIG_MAP = Ref("ConfigMap", "m-golden-tokens")
ONE, TWO = "1" * 64, "2" * 64


def ready(name: str, since: int = 60) -> dict[str, Any]:
    return pod(
        kubelet.running(since=since + 60)
        | {"conditions": [kubelet.condition("Ready", "True", ago=since)], "podIP": "10.0.0.1"},
        name=name,
    )


def serving(tokens: list[int], fingerprint: str = ONE, **more: Any) -> Sample:
    canary = Canary(fingerprint=fingerprint, tokens=tuple(tokens))
    return Sample(**{"phase": "serving", "canary": canary, **more})


def observe(*pods: dict[str, Any], stored: dict[str, Any] | None = None, **samples: Sample) -> Observed:
    return Observed(
        body=model_body(),
        pods=pods,
        children={} if stored is None else {CONFIG_MAP: stored},
        samples={f"uid-{name.replace('_', '-')}": sample for name, sample in samples.items()},
    )


def applied(observed: Observed) -> dict[str, Any]:
    """The ConfigMap as it is in the cluster after the plan."""
    (manifest,) = [each for each in plan_of([], observed).apply if each["kind"] == "ConfigMap"]
    return {**manifest, "metadata": {**manifest["metadata"], "uid": "c1"}}


def entries(config_map: dict[str, Any]) -> list[tuple[str, list[int], str]]:
    listed = json.loads(config_map["data"][names.GOLDEN_TOKENS_FILE])
    return [(each["fingerprint"], each["tokens"], each["pod"]) for each in listed]


def test_the_tokens_of_the_pod_that_was_ready_first_are_kept() -> None:
    observed = observe(
        ready("m-0", since=10), ready("m-1", since=50), m_0=serving([3, 4]), m_1=serving([1, 2])
    )
    assert entries(applied(observed)) == [(ONE, [1, 2], "m-1")]


def test_a_pod_that_does_not_serve_gives_no_tokens() -> None:
    terminating = ready("m-3")
    terminating["metadata"]["deletionTimestamp"] = kubelet.at(0)
    observed = observe(
        pod(kubelet.loading(), name="m-0"),
        ready("m-1"),
        ready("m-2"),
        terminating,
        ready("m-4"),
        m_0=serving([1]),
        m_1=serving([1], reason="CanaryMismatch"),
        m_2=serving([1], phase="stalled"),
        m_3=serving([1]),
    )
    assert not plan_of([], observed)
    assert golden_tokens.awaited(observed) is None


def test_what_is_kept_never_changes_and_is_not_written_again() -> None:
    """Whatever other pods answer, and though the operator was restarted and knows no pod's answer."""
    stored = applied(observe(ready("m-0"), m_0=serving([1, 2])))
    for observed in (
        observe(stored=stored),
        observe(ready("m-0"), stored=stored, m_0=serving([1, 2])),
        observe(ready("m-1", since=99), stored=stored, m_1=serving([5, 6])),
    ):
        assert not plan_of([], observed)
        assert golden_tokens.awaited(observed) is None


def test_another_fingerprint_is_added_in_one_write() -> None:
    stored = applied(observe(ready("m-0"), m_0=serving([1, 2])))
    observed = observe(ready("m-1"), stored=stored, m_1=serving([5], TWO))
    both = applied(observed)
    assert entries(both) == [(ONE, [1, 2], "m-0"), (TWO, [5], "m-1")]
    assert not plan_of([], observe(ready("m-1"), stored=both, m_1=serving([5], TWO)))


def test_the_oldest_entries_that_no_pod_has_are_dropped_at_the_bound() -> None:
    stored = None
    for number in range(MAX_GOLDEN_TOKENS + 3):
        fingerprint = f"{number:064x}"
        stored = applied(
            observe(
                ready("m-0", since=90),
                ready("m-1"),
                stored=stored,
                m_0=serving([7], f"{0:064x}"),
                m_1=serving([number], fingerprint),
            )
        )
    assert stored is not None
    kept = [int(fingerprint, 16) for fingerprint, _, _ in entries(stored)]
    assert kept == [0, *range(4, MAX_GOLDEN_TOKENS + 3)], "a pod still has the first"


def test_a_deleted_or_unusable_config_map_begins_anew() -> None:
    stored = applied(observe(ready("m-0"), m_0=serving([1, 2])))
    broken = {**stored, "data": {names.GOLDEN_TOKENS_FILE: "[[[["}}
    for observed in (
        observe(ready("m-1"), m_1=serving([5])),
        observe(ready("m-1"), stored=broken, m_1=serving([5])),
    ):
        assert entries(applied(observed)) == [(ONE, [5], "m-1")]


def test_the_name_of_a_new_config_map_is_looked_up_before_it_is_applied() -> None:
    observed = observe(ready("m-0"), m_0=serving([1]))
    assert golden_tokens.awaited(observed) == CONFIG_MAP
    foreign = Observed(
        body=observed.body, pods=observed.pods, samples=observed.samples, foreign=(CONFIG_MAP,)
    )
    assert not plan_of([], foreign), "another owner's object was overwritten"


def test_pods_that_a_former_release_rendered_are_not_replaced_for_the_sake_of_the_volume() -> None:
    body = model_body()
    model = spec.parse(body)
    rendered = resources.build(model, Settings(engine_image="registry.example/quire-server:1"))
    former = copy.deepcopy(rendered)
    (deployment,) = [child for child in former if child["kind"] == "Deployment"]
    pod_spec = deployment["spec"]["template"]["spec"]
    for part in (pod_spec, *pod_spec["containers"]):
        for key in ("volumes", "volumeMounts"):
            part[key] = [each for each in part.get(key, []) if each["name"] != "golden-tokens"]
    stored = resources.render_revision(model, body["spec"], former)
    assert stored.name != resources.render_revision(model, body["spec"], rendered).name

    assert resources.renders_same_pods(model, body, stored), "it would be rendered anew"
    applied_again = resources.with_revision(rendered, stored)
    (kept,) = [child for child in applied_again if child["kind"] == "Deployment"]
    assert kept["spec"]["template"] == deployment["spec"]["template"]
