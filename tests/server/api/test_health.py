"""/health: the numbers behind its checks, and the completion that `deep=true` runs."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.server import tiny_model
from tests.server.conftest import KEY
from tests.server.launch import NO_TLS, Server


def health(server, query=""):
    headers = {"authorization": f"Bearer {KEY}"}
    return httpx.get(server.url + "/health" + query, headers=headers, timeout=40, verify=NO_TLS)


def test_every_check_is_reported_with_its_numbers(server):
    numbers = health(server).json()["numbers"]
    assert set(numbers) == set(health(server).json()["checks"])
    assert numbers["queue_ok"].items() >= {"waiting": 0, "max_queued": 512, "limit": 0.8}.items()
    assert numbers["model_loaded"]["loaded_bytes"] == numbers["model_loaded"]["total_bytes"] > 0
    assert 0 <= numbers["memory_ok"]["kv_utilization"] <= numbers["memory_ok"]["limit"] == 0.95
    assert numbers["progress_ok"]["phase"] == "serving"
    assert 0 <= numbers["progress_ok"]["seconds_without_progress"] < numbers["progress_ok"]["limit"] == 30


def test_64_concurrent_deep_checks_share_one_completion(server):
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: health(server, "?deep=true"), range(64)))
    assert {answer.status_code for answer in answers} == {200}
    outcomes = [answer.json()["numbers"]["completion_ok"] for answer in answers]
    assert all(one["tokens"] == 4 and not one["failure"] for one in outcomes)
    assert len({one["seconds"] for one in outcomes}) == 1, "not all of them report the same completion"


@pytest.fixture
def full_server(tmp_path):
    """A server with max_num_seqs=1 that is busy with long answers of a slow model (many layers): one runs and
    five wait, so that it stays full for seconds on any machine.
    """
    model = tiny_model.write(tmp_path / "deep", layers=48)
    flags = ("--max-num-seqs", "1", "--max-num-queued-reqs", "5", "--kv-cache-memory-bytes", str(64 << 20))
    with Server(model, tmp_path, *flags) as server:
        server.wait_ready()
        body = {
            "model": "tiny",
            "prompt": "Once",
            "n": 6,
            "max_tokens": 1500,
            "ignore_eos": True,
            "stream": True,
        }
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as answer:
            assert answer.status_code == 200, answer.read()
            lines = answer.iter_lines()  # deleting this iterator closes the connection
            next(lines)
            yield server
            del lines


def test_the_deep_check_of_a_full_server_runs_before_waiting_clients(full_server):
    refused = full_server.post("/v1/completions", {"model": "tiny", "prompt": "Once", "max_tokens": 1})
    assert refused.json()["error"]["code"] == "queue_full"
    body = health(full_server, "?deep=true").json()
    assert body["checks"]["completion_ok"]
    assert full_server.statusz()["queued"] >= 1, "the long answers had ended"
