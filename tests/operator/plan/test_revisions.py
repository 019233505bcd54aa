"""A rendered revision is applied again until the spec changes, whatever the operator would render now."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from quire_operator import names, resources, spec
from quire_operator.observed import Observed, Ref
from quire_operator.plan import Plan, revisions
from quire_operator.plan.revisions import HISTORY_LIMIT, Revision
from quire_operator.resources import RenderedRevision, parse_stored, with_revision
from quire_operator.settings import Settings
from tests.operator.plan.planning import plan_of

Body = dict[str, Any]

OLD, NEW = (
    Settings(engine_image="engine:1"),
    Settings(engine_image="engine:2", operator_namespace="elsewhere"),
)


def body(**fields: Any) -> Body:
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": "m", "namespace": "ns", "uid": "u1", "generation": 1},
        "spec": {
            "model": {"source": {"pvc": {"claimName": "models"}}},
            "resources": {"cpu": "1", "memory": "2Gi"},
            **fields,
        },
    }


def revision_of(settings: Settings = OLD, **fields: Any) -> RenderedRevision:
    asked = body(**fields)
    model = spec.parse(asked)
    return resources.render_revision(model, asked["spec"], resources.build(model, settings))


MODEL = spec.parse(body())


def deployment(revision: str, *, done: bool = True) -> Observed:
    reason = "NewReplicaSetAvailable" if done else "ReplicaSetUpdated"
    live = {
        "kind": "Deployment",
        "metadata": {
            "name": "m",
            "generation": 2,
            "annotations": {names.ANNOTATION_RENDER_REVISION: revision},
        },
        "status": {
            "observedGeneration": 2,
            "replicas": 2,
            "updatedReplicas": 2 if done else 1,
            "conditions": [{"type": "Progressing", "reason": reason}],
        },
    }
    return Observed(body=body(), children={Ref("Deployment", "m"): live})


def revision_list(*entries: str, **fields: dict[str, str]) -> tuple[Revision, ...]:
    """Revisions by name, from the oldest; `fields`: what some of them carry."""
    return tuple(
        Revision(name=name, uid=f"uid-{name}", number=number, **fields.get(name, {}))
        for number, name in enumerate(entries, start=1)
    )


@pytest.mark.parametrize(
    "change",
    [
        {"replicas": 3},
        {"suspend": True},
        {"autoscaling": {"maxReplicas": 4}},
        {"rollout": {"paused": True, "strategy": "InPlace"}},
        {"engine": {"prefixCaching": True}},  # the default, written out
    ],
)
def test_replicas_autoscaling_and_rollout_settings_create_no_new_revision(change: Body) -> None:
    changed = body(**change)
    assert resources.renders_same_pods(spec.parse(changed), changed, revision_of())
    assert revision_of(**change).name == revision_of().name


@pytest.mark.parametrize("change", [{"engine": {"maxModelLen": 512}}, {"rollout": {"restartId": "2"}}])
def test_a_change_of_the_pod_template_creates_a_new_revision(change: Body) -> None:
    changed = body(**change)
    assert not resources.renders_same_pods(spec.parse(changed), changed, revision_of())
    assert revision_of(**change).name != revision_of().name


def test_a_revision_whose_spec_is_not_accepted_any_more_is_not_of_the_same_pods() -> None:
    from_before = replace(revision_of(), spec={**body()["spec"], "resources": {"cpu": "many"}})
    assert not resources.renders_same_pods(spec.parse(body()), body(), from_before)


def test_a_stored_revision_replaces_the_pod_template_and_leaves_replicas_and_strategy() -> None:
    model = spec.parse(body(replicas=3, autoscaling=None, rollout={"strategy": "InPlace"}))
    children = with_revision(resources.build(model, NEW), revision_of(OLD))

    live = {child["kind"]: child for child in children}
    assert live["Deployment"]["spec"]["template"]["spec"]["containers"][0]["image"] == "engine:1"
    assert live["Deployment"]["spec"]["replicas"] == 3
    assert live["Deployment"]["spec"]["strategy"]["rollingUpdate"]["maxSurge"] == 0
    assert [child["kind"] for child in children] == [c["kind"] for c in resources.build(model, NEW)]
    assert "elsewhere" not in str(live["NetworkPolicy"])


def test_the_autoscaler_comes_from_the_current_spec_and_never_from_a_revision() -> None:
    model = spec.parse(body(autoscaling={"maxReplicas": 4}))
    kinds = [child["kind"] for child in with_revision(resources.build(model, NEW), revision_of(OLD))]
    assert kinds[-2:] == ["HorizontalPodAutoscaler", "Deployment"]


@pytest.mark.parametrize(
    "path",
    [
        "metadata.namespace=kube-system",
        "metadata.name=other",
        "metadata.ownerReferences=",
        "kind=ClusterRole",
    ],
)
def test_a_tampered_revision_is_rejected(path: str) -> None:
    render = revision_of()
    data = copy.deepcopy(render.data)
    where, _, value = path.partition("=")
    place = data["children"][0]
    for step in where.split(".")[:-1]:
        place = place[step]
    place[where.rpartition(".")[2]] = value
    forged = resources.render_revision(MODEL, body()["spec"], data["children"])

    assert parse_stored(MODEL, forged.name, data) is None
    assert parse_stored(MODEL, render.name, data) is None
    assert parse_stored(MODEL, render.name, render.data) == render


@pytest.mark.parametrize("spec_of", [None, {}, [], {"template": {}}])
def test_a_revision_whose_deployment_has_no_pod_template_is_rejected(spec_of: Any) -> None:
    data = copy.deepcopy(revision_of().data)
    data["children"][-1]["spec"] = spec_of
    assert parse_stored(MODEL, revision_of().name, data) is None


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        [],
        {"children": None},
        {"children": [1]},
        {"children": []},
        {"children": [{"kind": "Service", "metadata": 1}]},
    ],
)
def test_a_revision_with_malformed_data_is_rejected(data: Any) -> None:
    assert parse_stored(MODEL, revision_of().name, data) is None


def test_the_first_render_is_recorded_as_revision_1_before_anything_is_applied() -> None:
    live = Observed(body=body())
    plan = plan_of(({"kind": "Service", "metadata": {"name": "m"}},), live, update_revision=revision_of())
    first, *others = plan.apply
    assert [one["kind"] for one in others] == ["Service"]
    assert (first["kind"], first["revision"], first["metadata"]["name"]) == (
        "ControllerRevision",
        1,
        revision_of().name,
    )
    assert first["metadata"]["ownerReferences"][0]["uid"] == "u1"
    assert names.ANNOTATION_ROLLBACK_TO not in first["metadata"]["annotations"]


def test_a_recorded_revision_is_not_written_again() -> None:
    assert (
        revisions.record(MODEL, revision_of(), revision_list("a", revision_of().name), deployment("a"))
        == Plan()
    )


def test_reverting_to_an_earlier_spec_reuses_its_revision_and_clears_its_failure() -> None:
    name = revision_of().name
    history = revision_list("a", name, "c", **{name: {"failed": "it did"}})
    (patch,) = revisions.record(MODEL, revision_of(), history, deployment("c")).revision_patches
    assert (patch.name, patch.number) == (name, 4)
    assert patch.annotations == {names.ANNOTATION_ROLLBACK_TO: "c", names.ANNOTATION_ROLLOUT_FAILED: None}


@pytest.mark.parametrize(
    ("running", "done", "back"),
    [
        ("c", True, "c"),  # the newest is rolled out
        ("c", False, "a"),  # it never was: what it would go back to itself
        ("a", True, "a"),  # after a rollback
        ("a", False, "a"),  # while one is under way
        ("gone", True, ""),
    ],
)
def test_a_new_revision_records_the_last_ready_one_as_its_rollback_target(
    running: str, done: bool, back: str
) -> None:
    history = revision_list("a", "b", "c", c={"rollback_to": "a"})
    plan = revisions.record(MODEL, revision_of(), history, deployment(running, done=done))
    annotations = plan.apply[0]["metadata"]["annotations"]
    assert annotations.get(names.ANNOTATION_ROLLBACK_TO, "") == back


def test_ten_revisions_are_kept_including_the_rollback_target() -> None:
    history = revision_list(
        *(f"r{n}" for n in range(HISTORY_LIMIT + 3)), **{f"r{HISTORY_LIMIT + 2}": {"rollback_to": "r0"}}
    )
    plan = revisions.record(MODEL, revision_of(), history, deployment(f"r{HISTORY_LIMIT + 2}", done=False))
    gone = [ref.name for ref, _ in plan.delete]
    assert gone == ["r1", "r2", "r3", "r4"]
    assert len(history) + 1 - len(gone) == HISTORY_LIMIT


def test_a_rollout_is_marked_failed_only_with_auto_rollback_and_an_earlier_ready_revision() -> None:
    wants = spec.parse(body(rollout={"autoRollback": True}))
    history, live = revision_list("a", "b", b={"rollback_to": "a"}), deployment("b", done=False)

    plan = revisions.mark_failed(wants, "b", history, live, "ConfigError: no")
    assert plan is not None
    (patch,) = plan.revision_patches
    assert (patch.name, patch.number, patch.annotations) == (
        "b",
        2,
        {names.ANNOTATION_ROLLOUT_FAILED: "ConfigError: no"},
    )
    assert revisions.mark_failed(MODEL, "b", history, live, "why") is None
    assert revisions.mark_failed(wants, "b", history, live, "") is None
    assert revisions.mark_failed(wants, "b", revision_list("a", "b"), live, "why") is None, (
        "nothing was ever Ready"
    )
    assert revisions.mark_failed(wants, "b", history, deployment("a", done=False), "why") is None, (
        "not applied yet"
    )
    assert revisions.mark_failed(wants, "b", history, deployment("b"), "why") is None, "it was rolled out"


def test_a_failed_revision_is_replaced_by_its_rollback_target_only_with_auto_rollback() -> None:
    wants = spec.parse(body(rollout={"autoRollback": True}))
    history = revision_list("a", "b", b={"rollback_to": "a", "failed": "why"})
    assert revisions.rollback_target(wants, "b", history) == ("a", "why")
    assert revisions.rollback_target(MODEL, "b", history) == ("", "")
    assert revisions.rollback_target(wants, "b", history[1:]) == ("", ""), "what it would go back to is gone"
    assert revisions.rollback_target(wants, "a", history) == ("", "")
    assert revisions.rollback_target(wants, "b", (history[0], replace(history[1], failed=""))) == ("", "")


def test_a_rollback_may_return_to_the_ready_revision_until_the_newer_one_was_ready() -> None:
    model = spec.parse(body(rollout={"autoRollback": True}))
    history = revision_list("a", "b", b={"rollback_to": "a"})

    assert revisions.may_return_to(model, "b", history[:1], deployment("a")) == "a", "not recorded yet"
    assert revisions.may_return_to(model, "b", history, deployment("a")) == "a", "the model is downloaded"
    assert revisions.may_return_to(model, "b", history, deployment("b", done=False)) == "a"
    assert revisions.may_return_to(model, "b", history, deployment("b")) == "", "it was Ready"
    assert revisions.may_return_to(MODEL, "b", history, deployment("b", done=False)) == "", "it is off"
