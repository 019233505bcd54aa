"""When the canary runs, what an answer or a failure proves, and what follows from wrong canaries."""

import pytest

from quire_server.core.request import FinishReason
from quire_server.core.step import NOT_FINITE, NOTHING_ALLOWED, OUT_OF_MEMORY
from quire_server.engine.proof import MAX_WRONG, RUN_OF_FAILURES, Outcome, ProofOfInference
from quire_server.fault_injection import Fault, Faults
from quire_server.health.heartbeat import Phase
from tests.server.engine.peer import Peer, make_request

CANARY_STEPS = 10
POISON = 7  # the last token of prompts that fail


def serving(engine):
    engine.wait(lambda engine: engine.state.read_heartbeat().phase is Phase.SERVING)
    return engine.state.read_heartbeat()


def fail(peer, *names):
    for name in names:
        peer.send(make_request(name, (POISON,), 1))
        assert peer.answer(name)[1].finish_reason is FinishReason.ERROR


def test_an_idle_engine_runs_the_canary_periodically(start_engine):
    engine = start_engine(canary_interval=0.1)
    with Peer(engine):
        first = serving(engine)
        engine.wait(lambda engine: engine.state.read_heartbeat().steps >= first.steps + 2 * CANARY_STEPS)
        later = engine.state.read_heartbeat()
    assert later.proof_at > first.proof_at
    assert later.reason == ""


def test_an_engine_whose_requests_are_answered_runs_no_canary(start_engine):
    engine = start_engine()
    with Peer(engine) as peer:
        before = serving(engine).proof_at
        for name in "abc":
            peer.send(make_request(name, max_tokens=10))
            peer.answer(name)
        engine.wait(lambda engine: engine.state.read_heartbeat().proof_at > before)
        assert engine.state.read_heartbeat().steps == CANARY_STEPS + 30, "a canary ran among real steps"


def test_steps_that_answer_nothing_prove_nothing_so_the_canary_runs_on_a_busy_engine(start_engine):
    engine = start_engine(canary_interval=0.3)
    engine.runner.delay = 0.02
    with Peer(engine) as peer:
        serving(engine)
        first = len(engine.runner.batches)
        peer.send(make_request("a", max_tokens=60), make_request("b", (50,), max_tokens=60))
        answers = {name: [] for name in "ab"}
        for event in peer.events():
            answers[event.request_id] += event.token_ids
            if all(len(tokens) == 60 for tokens in answers.values()):
                break
        rows = engine.runner.batches[first:]
        assert rows.count(1) >= CANARY_STEPS, "no canary ran beside them"
        assert set(rows) == {1, 2}, "the canary shared its batch"
    assert answers == {"a": list(range(6, 66)), "b": [(51 + i) % 100 for i in range(60)]}


@pytest.mark.parametrize("error", [NOT_FINITE, OUT_OF_MEMORY])
def test_a_run_of_failures_runs_the_canary_at_once_on_a_busy_engine(start_engine, error, monkeypatch):
    monkeypatch.setattr("quire_server.engine.proof._BETWEEN_RUNS_SECONDS", 0.0)
    engine = start_engine()  # the interval is an hour
    engine.runner.failing[POISON] = error
    engine.runner.delay = 0.005
    with Peer(engine) as peer, Peer(engine) as other:
        before = serving(engine).proof_at
        other.send(make_request("long", (1,), 60))
        fail(peer, *(f"bad-{i}" for i in range(RUN_OF_FAILURES)))
        engine.wait(lambda engine: engine.state.read_heartbeat().proof_at > before)
        assert engine.scheduler.num_running == 1, "it ran only once the engine was idle"
        assert other.answer("long")[0] == [(2 + i) % 100 for i in range(60)]


def test_answers_between_failures_and_failures_of_requests_themselves_make_no_run():
    proof = ProofOfInference(interval=60.0, stall=60.0, now=0.0)
    for second in range(10, 30):
        proof.failed(NOT_FINITE)
        proof.failed(NOT_FINITE if second % 2 else OUT_OF_MEMORY)
        assert not proof.is_due(second)
        proof.answered(second)
        proof.failed(NOTHING_ALLOWED)
        proof.failed("This prompt is too long.")
    assert not proof.is_due(30.0)


def test_failures_that_go_on_though_the_canary_is_right_run_it_now_and_then_only():
    """Or a client that knows what this model cannot compute would have others wait for canaries."""
    proof, runs = ProofOfInference(interval=3600.0, stall=60.0, now=0.0), 0
    for tick in range(1000):
        now = 100.0 + tick * 0.01
        proof.failed(NOT_FINITE)
        if proof.is_due(now):
            runs += 1
            proof.checked(Outcome.RIGHT, now)
    assert 1 <= runs <= 6, "ten seconds of failures"


def test_a_wrong_canary_makes_the_engine_unready_at_once_and_a_right_one_ready_again(start_engine, tmp_path):
    faults = Faults({"wrong_canary": Fault("wrong_canary", 1, True)}, tmp_path)  # once
    engine = start_engine(faults, canary_interval=1.0)
    with Peer(engine):
        serving(engine)
        engine.wait(lambda engine: engine.state.read_heartbeat().reason == "CanaryMismatch", 15)
        proof_at = engine.state.read_heartbeat().proof_at
        engine.wait(lambda engine: engine.state.read_heartbeat().reason == "")
        assert engine.state.read_heartbeat().proof_at > proof_at


def test_while_the_canary_is_wrong_no_answer_makes_the_engine_ready(start_engine):
    engine = start_engine(canary_interval=2.0)  # and it is repeated as often
    with Peer(engine) as peer:
        serving(engine)
        engine.runner.skew = 1
        engine.wait(lambda engine: engine.state.read_heartbeat().reason == "CanaryMismatch", 15)
        before = engine.state.read_heartbeat()
        peer.send(make_request("a"))
        peer.answer("a")
        after = engine.state.read_heartbeat()
        assert (after.reason, after.proof_at) == ("CanaryMismatch", before.proof_at)


@pytest.mark.parametrize("damage", ["wrong tokens", "NaN"])
def test_an_engine_whose_canary_stays_wrong_ends_by_itself(start_engine, damage):
    engine = start_engine(canary_interval=0.1, stall=0.4)
    with Peer(engine):
        serving(engine)
        if damage == "NaN":
            engine.runner.failing[engine.core._canary.prompt[-1]] = NOT_FINITE
        else:
            engine.runner.skew = 1
        steps = engine.state.read_heartbeat().steps
        engine.thread.join(60)
    assert f"{MAX_WRONG} times in a row" in str(engine.error)
    assert engine.state.read_heartbeat().reason == "CanaryMismatch"
    if damage != "NaN":
        assert engine.state.read_heartbeat().steps >= steps + MAX_WRONG * CANARY_STEPS - CANARY_STEPS


def test_a_canary_without_memory_is_no_mismatch_and_no_proof(start_engine):
    engine = start_engine(canary_interval=0.1)
    with Peer(engine):
        serving(engine)
        last = engine.core._canary.prompt[-1]
        engine.runner.failing[last] = OUT_OF_MEMORY
        failed = len(engine.runner.batches)
        engine.wait(lambda engine: len(engine.runner.batches) >= failed + 3)
        sample = engine.state.read_heartbeat()
        assert sample.reason == ""
        engine.runner.failing.clear()
        engine.wait(lambda engine: engine.state.read_heartbeat().proof_at > sample.proof_at)
