"""A server is ready only while all of its processes run and its answers are right."""

import os
import signal
from pathlib import Path

import pytest

from tests.server.launch import Server

SHORT = {"model": "tiny", "prompt": "Once", "max_tokens": 4, "temperature": 0}


def state_of(pid):
    """As in ps: T is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def stop(server, pid):
    """SIGSTOP; returns once it has taken effect."""
    os.kill(pid, signal.SIGSTOP)
    server.wait("it is stopped", lambda: state_of(pid) == "T")


def test_a_server_is_not_ready_within_10_s_of_the_stop_of_any_process_and_recovers(tiny, tmp_path):
    with Server(tiny, tmp_path) as server:
        pids = {**server.wait_ready().children(), "supervisor": server.process.pid}
        assert len(pids) == 4
        for name, pid in pids.items():
            stop(server, pid)
            server.wait(f"not ready without {name}", lambda: server.probe("readyz") != 200, 8)
            if name != "health":
                assert server.statusz()["silent"] == [name]
                assert server.probe("livez") == 200, "a short pause is not yet death"
            os.kill(pid, signal.SIGCONT)
            server.wait(f"ready again with {name}", lambda: server.probe("readyz") == 200, 8)
        assert server.post("/v1/completions", SHORT).status_code == 200


@pytest.mark.deep
def test_a_process_that_does_not_come_back_fails_liveness_and_is_named_when_the_server_ends(tiny, tmp_path):
    with Server(tiny, tmp_path, "--stall-timeout-seconds", "4") as server:
        stop(server, server.wait_ready().children()["api"])
        server.wait("not alive", lambda: server.probe("livez") == 503)
        assert (server.reason("livez"), server.statusz()["reason"]) == ("ProcessStalled", "ProcessStalled")
        server.terminate()  # as the kubelet does
        assert server.wait_end() == 72
        assert server.failure()["reason"] == "ProcessStalled"
        assert "api" in server.failure()["message"]
