"""A second replica is asked beside one that is slow, where a route says so: the first answer counts, once."""

import concurrent.futures
import functools

import httpx
import pytest

from quire_gateway.attempt_plan import AttemptPlan
from quire_gateway.outlier_detection import CONSECUTIVE_FAILURES, Verdict
from quire_gateway.replica import Endpoint
from quire_gateway.replicas import Model
from quire_gateway.retry_budget import RESERVE, RetryBudget
from quire_gateway.routing.by_load import RoundRobin
from quire_gateway.routing.router import RequestFacts
from tests.gateway.conftest import IN_CLUSTER, SLEEPS, num_held, slice_of
from tests.gateway.fault_proxy import FaultProxy
from tests.gateway.kube_stub import llm_object
from tests.gateway.test_faults import REFUSED, answer_of
from tests.gateway.test_relay import CHAT, LONG, send_and_wait, text_of
from tests.server.launch import NO_TLS

PATH = "/v1/chat/completions"
STREAM = {**CHAT, "stream": True}
AFTER = {"hedgeAfterMilliseconds": 200}


@pytest.fixture
def second(engines):
    """A proxy in front of the second replica."""
    with FaultProxy(engines[1].port) as proxy:
        yield proxy


@pytest.fixture
def pair(start, kube, engines, proxy, second):
    """A gateway before two replicas, chosen by chance, each behind a proxy, with a route that hedges."""

    def pair(reliability=AFTER, **environ):
        rules = [{"targets": [{"deployment": "tiny"}]}]
        spec = {"models": ["tiny"], "rules": rules, "routing": {"strategy": "Random"}}
        kube.put(llm_object("LLMRoute", "r", {**spec, "reliability": reliability}))
        slices = slice_of("one", engines[0], proxy.port), slice_of("two", engines[1], second.port)
        return start(*slices, **environ)

    return pair


def ask_first_at(gateway, uid, body=STREAM):
    """The answer and the line of a request that went to this replica first: about one of two does."""
    for _ in range(20):
        number = len(gateway.requests())
        answer = gateway.post(PATH, body)
        (line,) = gateway.wait_requests(1, number)
        if line["replicas"][0] == uid:
            return answer, line
    raise AssertionError(f"none of twenty went to {uid} first")


def num_retries(gateway, reason):
    text = httpx.get(gateway.url + "/metrics", verify=NO_TLS).text
    name = f'gateway_retries_total{{model="tiny",reason="{reason}"}} '
    return sum(float(line.removeprefix(name)) for line in text.splitlines() if line.startswith(name))


def in_flight(gateway):
    return [gateway.metric("gateway_replica_requests_in_flight", replica=uid) for uid in ("one", "two")]


def test_a_stream_whose_replica_is_silent_is_answered_by_another_one_and_counts_once(pair, proxy, engines):
    gateway = pair()
    proxy.hang = True
    answer, line = ask_first_at(gateway, "one")
    assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
    assert text_of(answer.text) == text_of(engines[1].post(PATH, STREAM).text)
    assert (line["replicas"], line["outcome"]) == (["one", "two"], "success")
    hedged = sum(len(one["replicas"]) == 2 for one in gateway.requests())
    assert (num_retries(gateway, "hedge"), num_retries(gateway, "timeout")) == (hedged, 0)
    tokens = sum(one["completion_tokens"] for one in gateway.requests())
    assert gateway.metric("gateway_tokens_total", model="tiny", type="completion") == tokens
    gateway.wait("nothing runs any more", lambda: in_flight(gateway) == [0, 0])


@pytest.mark.deep
def test_the_one_that_lost_is_freed_while_the_other_one_goes_on(pair, proxy, engines):
    gateway = pair()
    proxy.delay = 30.0
    aborted = engines[0].metric("llm_requests_total", status="aborted")
    body = {**LONG, "stream": True}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        asked = pool.submit(ask_first_at, gateway, "one", body)
        gateway.wait("the slow one computes", lambda: engines[0].statusz()["running"])
        gateway.wait(
            "the slow one is freed",
            lambda: engines[0].metric("llm_requests_total", status="aborted") > aborted,
        )
        assert not asked.done() and engines[1].statusz()["running"] == 1
        answer, line = asked.result(60)
    assert line["outcome"] == "success" and line["completion_tokens"] == LONG["max_tokens"]
    assert answer.text.endswith("data: [DONE]\n\n")


def test_the_first_one_is_kept_where_it_answers_after_all(pair, proxy, second, engines):
    gateway = pair()
    proxy.delay, second.hang = 0.6, True
    answer, line = ask_first_at(gateway, "one")
    assert (line["replicas"], line["outcome"]) == (["one", "two"], "success")
    assert text_of(answer.text) == text_of(engines[0].post(PATH, STREAM).text)
    gateway.wait("the other one is given up", lambda: in_flight(gateway) == [0, 0])


def test_where_both_fail_the_client_gets_the_last_failure(pair, proxy, second):
    gateway = pair({**AFTER, "attempts": 2}, FIRST_BYTE_SECONDS=1)
    proxy.hang, second.answer = True, answer_of(b"503 Service Unavailable", REFUSED)
    answer, line = ask_first_at(gateway, "one")
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "replica_timeout")
    assert line["replicas"] == ["one", "two"]
    assert num_retries(gateway, "hedge") == 1


def test_without_a_budget_for_retries_there_is_no_hedge(pair, proxy):
    gateway = pair({**AFTER, "retryBudgetPercent": 0}, FIRST_BYTE_SECONDS=1)
    proxy.hang = True
    answer, line = ask_first_at(gateway, "one")
    assert (answer.status_code, line["replicas"]) == (504, ["one"])


@pytest.mark.parametrize("fields", [{"stream": False}, {"cache_control": {"type": "ephemeral"}}])
def test_what_takes_long_by_itself_or_leaves_something_behind_is_not_computed_twice(pair, proxy, fields):
    gateway = pair(FIRST_BYTE_SECONDS=1, WHOLE_ANSWER_SECONDS=1)
    proxy.hang = True
    answer, line = ask_first_at(gateway, "one", {**STREAM, **fields})
    assert (answer.status_code, line["replicas"]) == (200, ["one", "two"])
    assert num_retries(gateway, "hedge") == 0 and num_retries(gateway, "timeout") >= 1


def test_a_request_that_was_held_is_not_hedged(start, kube, engines, proxy, second):
    kube.put(llm_object("LLMDeployment", "tiny", {"model": {"servedName": "tiny"}, **SLEEPS}))
    rules = [{"targets": [{"deployment": "tiny"}]}]
    kube.put(llm_object("LLMRoute", "r", {"models": ["tiny"], "rules": rules, "reliability": AFTER}))
    gateway = start(**IN_CLUSTER)
    proxy.delay = second.delay = 0.6
    with concurrent.futures.ThreadPoolExecutor() as pool:
        asked = pool.submit(gateway.post, PATH, STREAM)
        gateway.wait("it waits", lambda: num_held(gateway) == 1)
        kube.put(slice_of("one", engines[0], proxy.port))
        kube.put(slice_of("two", engines[1], second.port))
        assert asked.result(60).status_code == 200
    assert len(gateway.wait_requests(1)[-1]["replicas"]) == 1
    gateway.wait_replicas(2)
    assert gateway.post(PATH, STREAM).status_code == 200
    assert len(gateway.wait_requests(2)[-1]["replicas"]) == 2, "the replicas were not slow"


def test_a_client_that_hangs_up_frees_both(pair, proxy, second, engines):
    gateway = pair()
    proxy.delay = second.delay = 30.0
    before = [one.metric("llm_requests_total", status="aborted") for one in engines]
    with send_and_wait(gateway, engines, {**LONG, "stream": True}):
        gateway.wait("both compute", lambda: [one.statusz()["running"] for one in engines] == [1, 1])
    gateway.wait("both are freed", lambda: not sum(one.statusz()["running"] for one in engines))
    for one, earlier in zip(engines, before, strict=True):
        aborted = functools.partial(one.metric, "llm_requests_total", status="aborted")
        gateway.wait("it is counted", lambda aborted=aborted, earlier=earlier: aborted() > earlier)
    assert gateway.wait_requests(1)[-1]["outcome"] == "aborted"
    assert in_flight(gateway) == [0, 0]


@pytest.fixture
def model(clock):
    model = Model("models", "tiny", clock, lambda strategy: RoundRobin())
    model.update({uid: Endpoint(uid, "10.0.0.1", 8000, 8001) for uid in ("a", "b", "c")})
    return model


def plan_of(model, budget=None, most=3, kept_by=None):
    return AttemptPlan(
        model, RoundRobin(), RequestFacts("tiny"), budget or RetryBudget(), most, kept_by=kept_by
    )


def test_no_replica_is_asked_twice_whether_for_a_failure_or_beside_another(model):
    plan = plan_of(model, most=9)
    asked = [plan.next(0.0), plan.hedge(0.0), plan.next(0.0)]
    assert {one.replica.endpoint.uid for one in asked} == {"a", "b", "c"} == set(plan.tried)
    assert plan.next(0.0) is None and plan.hedge(0.0) is None


def test_a_hedge_is_one_of_the_attempts(model):
    plan = plan_of(model, most=2)
    assert plan.next(0.0) and plan.hedge(0.0)
    assert plan.next(0.0) is None and plan.hedge(0.0) is None


def test_a_hedge_takes_from_the_budget_of_retries_and_the_first_attempt_does_not(model):
    budget = RetryBudget()
    for _ in range(RESERVE):
        plan = plan_of(model, budget)
        assert plan.next(0.0) and plan.hedge(0.0)
    plan = plan_of(model, budget)
    assert plan.next(0.0) and plan.hedge(0.0) is None
    assert plan.hedge(1.0), "a second later there is one again"


def eject(model, uid):
    for _ in range(CONSECUTIVE_FAILURES):
        model.outliers.begin(uid)
        model.outliers.end(uid, Verdict.FAILURE, model.replicas)
    assert model.outliers.is_ejected(uid)


def test_the_replica_that_keeps_what_a_request_goes_on_with_is_asked_once_though_it_is_ejected(model):
    eject(model, "b")
    plan = plan_of(model, kept_by=model.replicas["b"].endpoint.hint)
    assert plan.next(0.0).replica.endpoint.uid == "b"
    assert plan.next(0.0) is None
    assert plan_of(model, kept_by="0" * 12).next(0.0) is None


def test_no_hedge_goes_to_a_replica_that_is_ejected(model):
    plan = plan_of(model)
    first = plan.next(0.0).replica.endpoint.uid
    (ejected, _) = sorted({"a", "b", "c"} - {first})
    model.update({uid: model.replicas[uid].endpoint for uid in (first, ejected)})
    eject(model, ejected)
    assert plan.hedge(0.0) is None and plan.next(0.0).replica.endpoint.uid == ejected
