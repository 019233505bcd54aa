"""A search of the log for a request's id finds what the API process and the engine say about it."""

import json
import threading

import httpx
import pytest

from tests.server.launch import Server

SHORT = {"model": "tiny", "prompt": "Once", "max_tokens": 4, "temperature": 0}


def ask(server, request_id, **fields):
    headers = {"x-request-id": request_id}
    return httpx.post(server.url + "/v1/completions", json=SHORT | fields, headers=headers, timeout=60)


def grep(server, text, process):
    """The lines of one process that hold the text, once there are any."""

    def found():
        lines = [json.loads(line) for line in server.log.read_text().splitlines() if text in line]
        return [line for line in lines if line["process"] == process]

    return server.wait(f"a line of {process} with {text}", found, 10)


def test_each_request_is_found_in_the_lines_of_both_processes_by_either_id(keyless):
    answer = ask(keyless, "trace-me-1", n=2)
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, "trace-me-1")
    completion = answer.json()["id"].removeprefix("cmpl-")
    for wanted in ("trace-me-1", completion):
        assert [line["request_id"] for line in grep(keyless, wanted, "api")] == ["trace-me-1"]
        lines = keyless.wait("both ended", lambda w=wanted: ended_twice(grep(keyless, w, "engine")))
        assert {line["request_id"] for line in lines} == {"trace-me-1"}
        assert {line["engine_request_id"] for line in lines} == {f"{completion}-0", f"{completion}-1"}


def ended_twice(lines):
    return lines if sum(line["message"] == "request ended" for line in lines) == 2 else None


@pytest.mark.deep
def test_a_request_that_fails_in_the_engine_is_in_its_log_with_the_client_s_id(tiny, tmp_path):
    with Server(tiny, tmp_path, fault="nan_weight:after=30") as server:
        server.wait_ready()
        server.wait("a request fails", lambda: ask(server, "before").status_code == 500)
        assert ask(server, "failing-1").status_code == 500
        (line,) = grep(server, "failing-1", "engine")
        assert (line["level"], line["message"], line["request_id"]) == (
            "error",
            "request failed",
            "failing-1",
        )
        assert "no finite number" in line["error"]
        assert "failing-1" in {line["request_id"] for line in grep(server, "failing-1", "api")}


@pytest.mark.deep
def test_requests_that_are_lost_with_the_engine_are_named_by_it(tiny, tmp_path):
    with Server(tiny, tmp_path, fault="crash_step:after=40") as server:
        server.wait_ready()
        asking = threading.Thread(target=ask, args=(server, "lost-1"), kwargs={"max_tokens": 500})
        asking.start()
        assert server.wait_end() == 70
        asking.join(60)
        (line,) = grep(server, "lost-1", "engine")
        assert line["message"] == "the engine ends with open requests"
        assert [lost["request_id"] for lost in line["lost"]] == ["lost-1"]
