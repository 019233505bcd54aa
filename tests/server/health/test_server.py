"""The health server as a process: it starts quickly, is small, and survives hostile peers."""

import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import pytest

from quire_server.health import engine_report, model_config
from quire_server.health.decision import Thresholds
from quire_server.health.heartbeat import Control, SharedState
from quire_server.health.server import MAX_WAITING, HealthServer


@pytest.fixture
def served(tmp_path):
    state = SharedState.create(tmp_path)
    server = HealthServer(("127.0.0.1", 0), state, Thresholds(60, 60), "1.2.3")
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield state, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def status_of(url):
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_the_probes_answer_before_there_is_any_engine(served):
    _, url = served
    assert {
        path: status_of(url + path)[0] for path in ("/startupz", "/readyz", "/livez", "/statusz", "/x")
    } == {
        "/startupz": 503,
        "/readyz": 503,
        "/livez": 200,
        "/statusz": 200,
        "/x": 404,
    }


def test_the_reason_is_in_the_body(served):
    state, url = served
    state.write_control(Control(failed="LoadStalled"))
    assert b'"reason": "LoadStalled"' in status_of(url + "/readyz")[1]


def test_a_connection_that_ended_just_before_it_was_to_make_room_hinders_no_probe(tmp_path):
    server = HealthServer(("127.0.0.1", 0), SharedState.create(tmp_path), Thresholds(60, 60), "1.2.3")
    ended = [socket.socket() for _ in range(MAX_WAITING)]  # not connected, as after a reset
    server._waiting = dict.fromkeys(ended)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        assert status_of(f"http://127.0.0.1:{server.server_address[1]}/livez")[0] == 200
        assert ended[0] not in server._waiting, "none had to make room"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        for each in ended:
            each.close()


def test_a_fault_of_the_prober_itself_is_in_the_log(served, monkeypatch, caplog):
    _, url = served
    monkeypatch.setattr("quire_server.health.decision.judge", lambda *_: 1 / 0)
    with pytest.raises(OSError):
        status_of(url + "/livez")
    assert "ZeroDivisionError" in caplog.text


def test_the_process_loads_neither_torch_nor_a_web_framework_nor_msgpack():
    code = (
        "import sys, quire_server.health.__main__\n"
        "heavy = ('torch', 'starlette', 'uvicorn', 'msgpack', 'numpy')\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "[]\n"


def test_statusz_has_only_the_config_entries_that_give_the_models_size(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 8, "secret": "x", "model_type": "llama"}')
    assert model_config.read(tmp_path) == {"hidden_size": 8, "model_type": "llama"}


@pytest.mark.parametrize(
    "text", [None, "", "[]", "{", '{"hidden_size": 1e400}', '{"model_type": "%s"}' % ("x" * 99)]
)
def test_a_model_that_cannot_be_read_leaves_the_probes_alone(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert model_config.read(tmp_path) == {}


def test_the_config_is_read_beside_the_probes(served, tmp_path, monkeypatch):
    """Storage that hangs must not make a pod look dead."""
    asked, answered = threading.Event(), threading.Event()
    state, _ = served
    server = HealthServer(("127.0.0.1", 0), state, Thresholds(60, 60), "1.2.3")
    monkeypatch.setattr(
        model_config, "read", lambda _: asked.set() or answered.wait(30) and {"hidden_size": 8}
    )
    with server:
        server.read_model_config(tmp_path)
        assert asked.wait(30)
        assert server.answer("/statusz")[1]["config"] == {}
        answered.set()
        while not (config := server.answer("/statusz")[1]["config"]):
            answered.wait(0)
    assert config == {"hidden_size": 8}


def test_what_is_effective_is_unknown_until_the_engine_has_said_it(tmp_path):
    assert engine_report.read_effective_config(tmp_path) is None
