"""A rollout moves conversations step by step, and back where the new deployment is worse."""

import calendar
import itertools
import json

import pytest

from quire_gateway import llm_route, rollout
from quire_gateway.gateway_leases import GatewayLeases, lease
from quire_gateway.rollout import Arm, Counts, RolloutCounts, Sides, StepKey
from tests.gateway.conftest import slice_of
from tests.gateway.kube_stub import NAMESPACE, endpoint_slice, llm_object
from tests.gateway.test_faults import BROKEN, answer_of
from tests.gateway.test_relay import CHAT

NOW = float(calendar.timegm((2026, 2, 2, 0, 0, 0)))
STEPS = [
    {"weight": 10, "pauseSeconds": 60},
    {"weight": 50, "pauseSeconds": 30},
    {"weight": 100, "pauseSeconds": 0},
]
NOTHING = Sides()
ABORT = {"errorPercent": 5, "ttftPercent": 150, "minRequests": 20}
IN_CLUSTER = {"POD_NAMESPACE": NAMESPACE, "POD_NAME": "gateway-1"}


def spec(**changes):
    rules = [{"targets": [{"deployment": "tiny"}]}]
    one = {"deployment": "next", "steps": STEPS, "abortOn": ABORT, **changes}
    body = llm_object("LLMRoute", "r", {"models": ["chat"], "rules": rules, "rollout": one})
    return llm_route.parse(body).rollout


def advance(stored=None, seen=NOTHING, now=NOW, resolved=True, of=None):
    return rollout.advance(of or spec(), stored, seen, now, is_resolved=resolved)


def seen(requests=0, errors=0, seconds=0.1, stable=100, stable_seconds=0.1):
    """Of the new deployment, and of the other one."""
    new = Counts(requests, errors, requests - errors, seconds * (requests - errors))
    return Sides(Counts(stable, 0, stable, stable_seconds * stable), new)


def test_steps_follow_one_another_by_their_time_until_all_are_done():
    status, taken = advance(), []
    for minute in range(6):
        status = advance(status, seen(500), NOW + 30 * minute)
        taken.append((status["currentWeight"], status["phase"]))
    assert taken == [
        (10, "Progressing"),
        (10, "Progressing"),
        (50, "Progressing"),
        (100, "Progressing"),
        (100, "Completed"),
        (100, "Completed"),
    ]
    assert "100 %" in status["message"]


@pytest.mark.parametrize(
    ("observed", "aborts"),
    [
        (seen(100, 5), ""),
        (seen(100, 6), "6.0 % of 100 requests to next failed"),
        (seen(19, 19), ""),
        (seen(20, 20), "100.0 %"),
        (seen(100, 0, seconds=0.149), ""),
        (seen(100, 0, seconds=0.151), "begin after 0.151 s, those of the others after 0.100 s"),
        (seen(100, 0, seconds=0.9, stable=19), ""),
        (seen(100, 2, seconds=0.001, stable_seconds=9), ""),
    ],
)
def test_a_deployment_that_fails_or_is_slow_loses_its_whole_share_once_enough_was_seen(observed, aborts):
    status = advance(advance(), observed, NOW + 5)
    assert (status["phase"] == "Aborted") is bool(aborts)
    assert status["currentWeight"] == (0 if aborts else 10)
    assert aborts in status["message"]


def test_what_was_aborted_or_is_done_stays_so_until_the_rollout_is_changed():
    aborted = advance(advance(), seen(100, 50), NOW + 5)
    assert advance(aborted, seen(), NOW + 9000) == aborted
    again = advance(aborted, seen(), NOW + 9000, of=spec(steps=STEPS[:1]))
    assert (again["phase"], again["step"], again["currentWeight"]) == ("Progressing", 0, 10)


def test_without_limits_nothing_aborts():
    free = spec(abortOn=None)
    status = advance(advance(of=free), seen(1000, 1000), NOW + 5, of=free)
    assert status["phase"] == "Progressing"


def test_it_begins_once_the_deployment_is_there():
    waiting = advance(resolved=False)
    assert (waiting["currentWeight"], waiting["phase"]) == (0, "Progressing")
    assert "no LLMDeployment next" in waiting["message"]
    assert advance(waiting, seen(), NOW + 900, resolved=False) == waiting
    assert advance(waiting, seen(), NOW + 900)["currentWeight"] == 10


@pytest.mark.parametrize("stored", [{"digest": "x"}, {"digest": 3, "step": 9}, {"since": "yesterday"}])
def test_a_status_that_is_not_ours_is_begun_anew(stored):
    assert advance(stored)["step"] == 0


def test_a_status_whose_time_cannot_be_read_does_not_stop_it():
    assert advance({**advance(), "since": "soon"}, seen(), NOW)["step"] == 1


def test_counts_are_those_of_one_step_and_travel_by_leases():
    key, later = StepKey("d", 0), StepKey("d", 1)
    counts = RolloutCounts()
    for number in range(10):
        counts.ended(Arm("u", key, number < 3), is_error=number == 0, first_byte=None if number == 0 else 0.5)
    leases = GatewayLeases(lambda: None, lambda: 0.0)
    leases.put(lease("g", {}, "t", json.loads(json.dumps(counts.document()))))
    (document,) = leases.rollouts()
    assert rollout.counts_of(document, "u", key) == Sides(Counts(7, 0, 7, 3.5), Counts(3, 1, 2, 1.0))
    assert rollout.counts_of(document, "u", later) == rollout.counts_of(document, "v", key) == Sides()
    counts.ended(Arm("u", later, is_candidate=True), is_error=False, first_byte=1.0)
    counts.ended(Arm("u", key, is_candidate=True), is_error=True, first_byte=1.0)
    assert rollout.counts_of(counts.document(), "u", later) == Sides(Counts(), Counts(1, 0, 1, 1.0))
    counts.keep(set())
    assert counts.document() == {}


@pytest.mark.parametrize(
    "document", [None, 3, {"u": 1}, {"u": ["d", 0, [1], [2]]}, {"u": ["d", 0, [1, 2, 3, "x"], []]}]
)
def test_a_lease_that_cannot_be_read_counts_nothing(document):
    assert rollout.counts_of(document, "u", StepKey("d", 0)) == Sides()


@pytest.fixture
def rolling(start, kube, engines, proxy):
    """A gateway before a deployment and one that conversations move to, which is behind a proxy."""

    def rolling(**changes):
        for name, port in (("tiny", engines[0].port), ("next", proxy.port)):
            kube.put(llm_object("LLMDeployment", name, {"model": {"servedName": "tiny"}}))
            if name == "next":
                kube.put(endpoint_slice(name, {name: "127.0.0.1"}, model=name, port=port))
        rules = [{"targets": [{"deployment": "tiny"}]}]
        one = {"deployment": "next", "steps": STEPS, "abortOn": ABORT, **changes}
        kube.put(llm_object("LLMRoute", "r", {"models": ["chat"], "rules": rules, "rollout": one}))
        gateway = start(slice_of("one", engines[1]), **IN_CLUSTER)
        gateway.wait("the first step", lambda: status_of(gateway).get("currentWeight"))
        return gateway

    return rolling


def status_of(gateway):
    return (gateway.kube.objects["llmroutes"]["r"].get("status") or {}).get("rollout") or {}


def ask(gateway, number):
    """Of a conversation of its own; the deployment that it went to."""
    messages = [{"role": "user", "content": f"{number} Once"}]
    before = len(gateway.requests())
    gateway.post("/v1/chat/completions", {**CHAT, "model": "chat", "messages": messages, "max_tokens": 1})
    (line,) = gateway.wait_requests(1, before)
    return line["deployment"]


def test_a_share_of_the_conversations_goes_to_the_new_deployment_and_each_stays(rolling):
    gateway = rolling(steps=[{"weight": 50, "pauseSeconds": 3600}])
    others = itertools.count(100)
    gateway.wait("the gateway has the step, too", lambda: ask(gateway, next(others)) == "next")
    first = [ask(gateway, number) for number in range(20)]
    assert 3 <= first.count("next") <= 17
    assert [ask(gateway, number) for number in range(20)] == first


def test_a_rollout_that_goes_through_ends_with_every_conversation_at_the_new_deployment(rolling):
    gateway = rolling(steps=[{"weight": 10, "pauseSeconds": 0}, {"weight": 100, "pauseSeconds": 0}])
    gateway.wait("it is completed", lambda: status_of(gateway).get("phase") == "Completed")
    gateway.wait("it is routed by", lambda: ask(gateway, 1) == "next")
    assert {ask(gateway, number) for number in range(8)} == {"next"}
    conditions = gateway.kube.objects["llmroutes"]["r"]["status"]["conditions"]
    assert ("RolledOut", "True") in [(one["type"], one["status"]) for one in conditions]


def test_a_deployment_that_fails_loses_its_share_and_the_status_says_why(rolling, proxy):
    limits = {"errorPercent": 5, "minRequests": 3}
    gateway = rolling(steps=[{"weight": 50, "pauseSeconds": 3600}], abortOn=limits)
    proxy.answer = answer_of(b"503 Service Unavailable", BROKEN)
    numbers = iter(range(1000))
    gateway.wait(
        "it is aborted", lambda: ask(gateway, next(numbers)) and status_of(gateway)["phase"] == "Aborted"
    )
    assert "requests to next failed, more than 5 %" in status_of(gateway)["message"]
    gateway.wait("it is routed by", lambda: {ask(gateway, n) for n in range(8)} == {"tiny"})
