"""The probe server as a process: light, quick, and deaf to strangers."""

import subprocess
import sys
import threading
import urllib.error
import urllib.request

import pytest

from quire_server.health.decision import Thresholds
from quire_server.health.heartbeat import Control, SharedState
from quire_server.health.server import HealthServer


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
        with urllib.request.urlopen(url, timeout=5) as response:
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
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=True)
    assert ran.stdout == "[]\n"
