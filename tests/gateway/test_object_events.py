"""Events of routes and clients: one for each transition that a user must notice, and none besides."""

import json

import pytest

from quire_gateway.object_events import Event, document, events
from tests.gateway.conftest import slice_of
from tests.gateway.kube_stub import NAMESPACE, llm_object

ROUTE = {"models": ["chat"], "rules": [{"targets": [{"deployment": "tiny"}]}]}


def false(reason, message="why"):
    return {"type": "Ready", "status": "False", "reason": reason, "message": message}


def written(new, old=None, generation=1, **spec):
    body = llm_object("LLMRoute", "r", {**ROUTE, **spec}, generation=generation)
    return list(events({**body, "status": old or {}}, new))


@pytest.mark.parametrize("reason", ["NameConflict", "KeyConflict", "Unreadable", "BudgetSpent"])
def test_what_stops_requests_is_a_warning_once(reason):
    status = {"conditions": [false(reason), false(reason)]}
    assert written(status) == [Event("Warning", reason, "why")]
    assert written(status, status) == []
    assert written({"conditions": []}, status) == []
    assert written(status, {"conditions": []}) == [Event("Warning", reason, "why")]


def test_a_kill_switch_is_said_when_it_holds_at_every_gateway_and_again_only_after_it_did_not():
    def status(applied, generation=1):
        gateways = {"seen": 2, "applied": applied}
        return {"observedGeneration": generation, "gateways": gateways, "conditions": [false("KillSwitch")]}

    assert written(status(1)) == []
    (event,) = written(status(2), status(1))
    assert event.reason == "KillSwitchApplied" and "refuses" in event.note
    switch = {"enabled": True, "mode": "Fallback"}
    (event,) = written(status(2), status(1), killSwitch=switch)
    assert "fallbacks answer" in event.note and "refuse" not in event.note
    assert written(status(2), status(2)) == []
    assert [one.reason for one in written(status(2, 2), status(2), 2)] == ["KillSwitchApplied"]


def test_each_step_of_a_rollout_and_its_end_is_an_event():
    def status(phase="Progressing", step=0, weight=10, digest="d"):
        rollout = {"phase": phase, "step": step, "currentWeight": weight, "digest": digest, "message": phase}
        return {"rollout": rollout}

    assert [one.reason for one in written(status())] == ["RolloutStep"]
    assert written(status(), status()) == []
    assert [one.reason for one in written(status(step=1, weight=50), status())] == ["RolloutStep"]
    assert written(status("Aborted", weight=0), status()) == [Event("Warning", "RolloutAborted", "Aborted")]
    assert written(status("Aborted", weight=0), status("Aborted", weight=0)) == []
    assert [one.kind for one in written(status("Completed", 1, 100), status())] == ["Normal"]
    assert [one.reason for one in written(status(digest="e"), status("Aborted"))] == ["RolloutStep"]
    assert written({"rollout": None}, status()) == []


def test_two_gateways_that_write_one_change_name_its_event_alike():
    body = llm_object("LLMClient", "alice", {})
    one, other = (document(Event("Warning", "BudgetSpent", "x" * 5000), body, name, "t") for name in "ab")
    assert one["metadata"] == other["metadata"] and one["metadata"]["namespace"] == NAMESPACE
    assert len(one["note"]) <= 1024 and one["regarding"]["uid"] == body["metadata"]["uid"]
    later = document(Event("Warning", "BudgetSpent", "y"), body, "a", "t")
    assert later["metadata"]["name"] != one["metadata"]["name"]


def test_a_gateway_says_on_the_object_that_a_kill_switch_holds(start, kube, engines):
    kube.put(llm_object("LLMRoute", "r", ROUTE))
    gateway = start(slice_of("one", engines[0]), POD_NAMESPACE=NAMESPACE, POD_NAME="g")
    kube.put(llm_object("LLMRoute", "r", {**ROUTE, "killSwitch": {"enabled": True}}, generation=2))
    gateway.wait("an Event", lambda: kube.objects.get("events"))
    (event,) = kube.objects["events"].values()
    assert (event["reason"], event["type"]) == ("KillSwitchApplied", "Normal")
    assert event["regarding"]["name"] == "r" and event["reportingInstance"] == "g"
    assert "sk-" not in json.dumps(event)
