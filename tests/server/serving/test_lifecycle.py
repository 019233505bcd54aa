"""The lifecycle of a server for the kubelet: loading, overload, drain, stall, and every way to end."""

import contextlib
import json
import os
import shutil
import signal
import threading
import time

import httpx
import openai
import pytest

from e2e.api import specs
from quire_operator import resources, spec
from quire_operator.settings import Settings
from quire_server.supervisor.open_files import LEAST_OPEN_FILES
from tests.server.launch import Server

LONG = {"model": "tiny", "prompt": "Once", "max_tokens": 800, "temperature": 0}
LONG |= {"extra_body": {"ignore_eos": True}}


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_full_queue_refuses_requests_and_a_drain_finishes_accepted_ones(tiny, tmp_path):
    flags = ("--max-num-seqs", "1", "--max-num-queued-reqs", "1", "--pre-stop-seconds", "10")
    with Server(tiny, tmp_path, *flags) as server, contextlib.ExitStack() as stack:
        server.wait_ready()
        held, queued, idle, late = (stack.enter_context(server.client()) for _ in range(4))
        idle.models.list()
        stream = iter(held.completions.create(**LONG, stream=True))
        next(stream)
        answers = []
        short = {**LONG, "max_tokens": 5}
        waiting = threading.Thread(target=lambda: answers.append(queued.completions.create(**short)))
        waiting.start()
        server.wait("one waits", lambda: server.metric("llm_active_requests") == 2)

        with pytest.raises(openai.InternalServerError) as refused:
            late.completions.create(**short)
        assert refused.value.status_code == 503
        assert refused.value.code == "queue_full"
        assert int(refused.value.response.headers["retry-after"]) >= 1
        assert server.probe("readyz") == 200, "a full queue stays ready"

        server.terminate()
        server.wait("it drains", lambda: server.statusz()["phase"] == "draining")
        assert server.probe("readyz") == 503
        assert server.probe("livez") == 200
        on_open_connection = idle.models.with_raw_response.list()
        assert on_open_connection.status_code == 200
        assert on_open_connection.headers["connection"] == "close"
        on_new_connection = httpx.get(server.url + "/v1/models")
        assert on_new_connection.status_code == 503
        assert on_new_connection.headers["retry-after"] == "1"
        assert on_new_connection.json()["error"]["code"] == "draining"

        reasons = [choice.finish_reason for chunk in stream for choice in chunk.choices]
        waiting.join(60)
        stack.close()  # idle connections would be waited for, in case their clients come back
        assert reasons[-1] == "length", "the stream was cut"
        assert answers and answers[0].choices[0].finish_reason == "length", "the queued request was lost"
        assert server.wait_end() == 0
        assert server.termination_log.read_text() == ""


@pytest.mark.deep
def test_a_client_on_an_open_connection_sees_no_error_during_a_drain(tiny, tmp_path):
    """Its connection stays open between two requests: the last response closes it, and none is refused."""
    with Server(tiny, tmp_path, "--pre-stop-seconds", "60") as server, server.client() as client:
        server.wait_ready()
        client.completions.create(**{**LONG, "max_tokens": 2})
        server.terminate()
        server.wait("it drains", lambda: server.statusz()["phase"] == "draining")
        time.sleep(1.0)  # no request is running: only the open connection keeps the server
        answer = client.completions.with_raw_response.create(**{**LONG, "max_tokens": 2})
        assert answer.headers["connection"] == "close"
        began = time.monotonic()
        assert server.wait_end() == 0
        assert time.monotonic() - began < 30, "it waited for a connection that it had closed itself"


@pytest.mark.deep
def test_requests_beyond_the_drain_timeout_get_an_error_and_are_logged_as_cancelled(tiny, tmp_path):
    with Server(tiny, tmp_path, "--drain-timeout-seconds", "0.3") as server, server.client() as client:
        server.wait_ready()
        stream = iter(client.completions.create(**{**LONG, "max_tokens": 1900}, stream=True))
        next(stream)
        server.terminate()
        with pytest.raises(openai.APIError, match="going away"):
            list(stream)
        assert server.wait_end() == 0
        assert '"status": "cancelled"' in server.log.read_text()


@pytest.mark.deep
def test_on_a_spot_node_a_stream_that_is_cut_gets_its_final_error_event_within_the_notice(tiny, tmp_path):
    """With the settings that the operator renders for a notice of ten seconds. The engine stops meanwhile,
    so that it is cut however fast the machine is.
    """
    body = specs.minimal(
        scheduling={"spot": {"enabled": True, "noticeSeconds": 10}}, drain={"preStopSeconds": 2}
    )
    children = resources.build(spec.parse(body), Settings(engine_image="engine:1"))
    (config_map,) = [child["data"] for child in children if child["kind"] == "ConfigMap"]
    names = ("QUIRE_DRAIN_TIMEOUT_SECONDS", "QUIRE_PRE_STOP_SECONDS")
    environ = {name: config_map[name] for name in names}
    with (
        Server(tiny, tmp_path, fault="stuck_step:after=60", **environ) as server,
        server.client() as client,
    ):
        server.wait_ready()
        stream = iter(client.completions.create(**{**LONG, "max_tokens": 1900}, stream=True))
        next(stream)
        server.terminate()  # preStop has passed
        begun = time.monotonic()
        with pytest.raises(openai.APIError, match="going away"):
            list(stream)
        assert time.monotonic() - begun < 10 - 2, "the node was gone before the client was told"


def test_a_stalled_engine_fails_readiness_then_liveness_and_exits_with_engine_stalled(tiny, tmp_path):
    flags = ("--stall-timeout-seconds", "4", "--drain-timeout-seconds", "60")
    with Server(tiny, tmp_path, *flags, fault="stuck_step:after=15") as server, server.client() as client:
        server.wait_ready()
        outcome = []

        def ask():
            try:
                client.completions.create(**LONG)
            except openai.APIStatusError as error:
                outcome.append(error.status_code)

        asking = threading.Thread(target=ask)
        asking.start()
        server.wait_fault("stuck_step")
        server.wait("not ready", lambda: server.probe("readyz") == 503)
        assert server.probe("livez") == 200, "half of the stall time is not yet death"
        server.wait("not alive", lambda: server.probe("livez") == 503)
        assert server.reason("livez") == "EngineStalled"
        assert server.statusz()["phase"] == "stalled"
        assert httpx.get(server.url + "/health").json()["checks"]["progress_ok"] is False
        server.terminate()
        assert server.wait_end() == 71
        assert server.failure()["reason"] == "EngineStalled"
        asking.join(60)
        assert outcome == [503], "the client was left without an answer"


@pytest.mark.deep
def test_a_slow_load_reports_progress_and_a_killed_engine_ends_the_server_with_its_children(tiny, tmp_path):
    with Server(tiny, tmp_path, "--load-stall-timeout-seconds", "3", fault="slow_load:after=0.8") as server:
        status = server.wait("a part is loaded", lambda: server.probe("livez") and loaded_part(server))
        assert status["phase"] == "loading"
        assert status["etaSeconds"] > 0
        assert [server.probe(name) for name in ("startupz", "readyz", "livez")] == [503, 503, 200]
        server.wait_ready()
        assert server.statusz()["loadSeconds"] > 6
        assert server.metric("llm_model_load_seconds") > 6

        children = server.children()
        os.kill(children["engine"], signal.SIGKILL)
        assert server.wait_end() == 137
        assert server.termination_log.read_text() == "", "the kubelet's OOMKilled must not be hidden"
        assert not any(alive(pid) for pid in children.values())


def loaded_part(server):
    status = server.statusz()
    return status if 0 < status["loadedBytes"] < status["totalBytes"] else None


@pytest.fixture(scope="module")
def faulty(tiny, tmp_path_factory):
    """A server that goes on with its faults."""
    faults = "flapping_readiness:after=1; queue_depth:after=42"
    with Server(tiny, tmp_path_factory.mktemp("faulty"), fault=faults) as server:
        yield server.wait_ready()


def test_flapping_readiness_never_fails_liveness_or_ends_the_server(faulty):
    faulty.wait_fault("flapping_readiness")
    for _ in range(2):
        faulty.wait("unready", lambda: faulty.probe("readyz") == 503)
        faulty.wait("why", lambda: faulty.statusz()["reason"] == "FlappingReadiness")
        assert faulty.probe("livez") == 200
        faulty.wait("ready again", lambda: faulty.probe("readyz") == 200)
    with faulty.client() as client:
        answer = client.completions.create(**LONG | {"max_tokens": 5})
    assert answer.usage.completion_tokens == 5
    assert not faulty.ended()


def test_a_forced_queue_depth_is_what_metrics_and_status_report(faulty):
    faulty.wait_fault("queue_depth")
    faulty.wait("it is in the metrics", lambda: faulty.metric("llm_queue_depth") == 42)
    assert faulty.statusz()["queued"] == 42


def test_a_stalled_load_ends_the_server_with_load_stalled(tiny, tmp_path):
    with Server(tiny, tmp_path, "--load-stall-timeout-seconds", "2", fault="stalled_load") as server:
        server.wait_fault("stalled_load")
        assert server.wait_end() == 75
        assert server.failure()["reason"] == "LoadStalled"
        assert server.failure()["exitCode"] == 75


def test_a_load_beyond_the_startup_timeout_ends_the_server_with_startup_timeout(tiny, tmp_path):
    flags = ("--startup-timeout-seconds", "30")  # importing torch takes seconds on a busy machine
    with Server(tiny, tmp_path, *flags, fault="slow_load:after=4") as server:
        server.wait_fault("slow_load")
        assert server.wait_end() == 74
        assert server.failure()["reason"] == "StartupTimeout"


def test_an_engine_crash_ends_the_server_with_engine_crashed(tiny, tmp_path):
    with Server(tiny, tmp_path, fault="crash_step:after=15") as server, server.client() as client:
        server.wait_ready()
        with pytest.raises(openai.InternalServerError):
            client.completions.create(**LONG)
        server.wait_fault("crash_step")
        assert server.wait_end() == 70
        assert server.failure()["reason"] == "EngineCrashed"
        (request,) = [line for line in server.log.read_text().splitlines() if '"message": "request"' in line]
        assert json.loads(request)["status"] == "error", "an outage was counted as load that was shed"


def test_an_engine_that_crashes_while_it_loads_ends_the_server_with_engine_crashed(tiny, tmp_path):
    with Server(tiny, tmp_path, fault="crash_on_load") as server:
        server.wait_fault("crash_on_load")
        assert server.wait_end() == 70
        assert server.failure()["reason"] == "EngineCrashed"


def test_a_stuck_drain_is_terminated_at_its_timeout(tiny, tmp_path):
    with Server(tiny, tmp_path, "--drain-timeout-seconds", "0", fault="stuck_drain") as server:
        server.wait_ready()
        server.terminate()
        server.wait_fault("stuck_drain")
        assert server.wait_end() == 71
        assert "drain" in server.failure()["message"]


def test_a_server_terminated_while_loading_exits_at_once(tiny, tmp_path):
    with Server(tiny, tmp_path) as server:
        server.wait("it answers", lambda: server.probe("startupz") == 503)
        server.terminate()
        assert server.wait_end() == 0


def test_a_missing_model_ends_the_server_with_model_not_found(tmp_path):
    with Server(tmp_path / "nowhere", tmp_path) as server:
        assert server.wait_end() == 66
        assert server.failure()["reason"] == "ModelNotFound"
        assert "nowhere" in server.failure()["message"]


def test_a_truncated_model_ends_the_server_with_model_corrupt(tiny, tmp_path):
    model = shutil.copytree(tiny, tmp_path / "model")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with Server(model, tmp_path) as server:
        assert server.wait_end() == 65
        assert server.failure()["reason"] == "ModelCorrupt"
        assert "safetensors" in server.failure()["message"]


def test_a_port_in_use_is_a_config_error_that_names_the_flag(tiny, tmp_path):
    with Server(tiny, tmp_path) as first:
        first.wait("it listens", lambda: first.probe("livez"))
        (tmp_path / "second").mkdir()
        with Server(tiny, tmp_path / "second", "--health-port", str(first.health_port)) as second:
            assert second.wait_end() == 2
            assert second.failure()["reason"] == "ConfigError"
            assert "--health-port" in second.failure()["message"]
        pids = list(first.children().values())
        assert len(pids) == 3
        first.process.kill()
        first.wait("no child survives its supervisor", lambda: not any(map(alive, pids)))


def test_an_invalid_setting_ends_the_server_with_config_error(tiny, tmp_path):
    with Server(tiny, tmp_path, QUIRE_MAX_NUM_SEQS="many") as server:
        assert server.wait_end() == 2
        assert server.failure()["reason"] == "ConfigError"
        assert "QUIRE_MAX_NUM_SEQS" in server.failure()["message"]


def test_a_server_with_the_least_open_files_serves_and_with_one_less_says_so(tiny, tmp_path):
    with Server(tiny, tmp_path, within=("prlimit", f"--nofile={LEAST_OPEN_FILES - 1}")) as server:
        assert server.wait_end() == 2
        assert server.failure()["reason"] == "ConfigError"
        assert f"{LEAST_OPEN_FILES - 1} open files" in server.failure()["message"]
        assert "ulimit -n 4096" in server.failure()["message"]
    soft_and_hard = f"--nofile=24:{LEAST_OPEN_FILES}"
    with Server(tiny, tmp_path, within=("prlimit", soft_and_hard)) as server, server.client() as client:
        server.wait_ready()
        assert client.completions.create(model="tiny", prompt="Once", max_tokens=4).choices
