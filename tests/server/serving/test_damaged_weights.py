"""A server whose weights are damaged leaves the Service, and restarts, though its processes run."""

import json
import os
import time

import pytest
from safetensors.numpy import load_file, save_file

from tests.server import tiny_model
from tests.server.launch import Server

SHORT = {"model": "tiny", "prompt": "Once", "max_tokens": 4, "temperature": 0}
PROBES_SECONDS = 6.0  # the kubelet takes a pod out of its Service when the second probe in a row has failed


def test_a_nan_in_one_weight_takes_the_server_out_of_rotation_within_10_s_and_restarts_it(tiny, tmp_path):
    """Requests fail one after the other; the canary, which is not due for an hour, finds out why."""
    flags = ("--canary-interval-seconds", "3600", "--stall-timeout-seconds", "16")
    with Server(tiny, tmp_path, *flags, fault="nan_weight:after=30") as server:
        server.wait_ready()
        answers = [server.post("/v1/completions", SHORT) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200] * 3
        server.wait("a request fails", lambda: server.post("/v1/completions", SHORT).status_code == 500)
        began = time.monotonic()
        for _ in range(2):
            answer = server.post("/v1/completions", SHORT)
            assert "no finite number" in answer.json()["error"]["message"]
        server.wait("not ready", lambda: server.probe("readyz") == 503)
        assert time.monotonic() - began + PROBES_SECONDS < 10
        assert server.reason("readyz") == server.statusz()["reason"] == "CanaryMismatch"
        assert [server.probe(name) for name in ("startupz", "livez")] == [200, 200], "it ends by itself"
        assert server.wait_end() == 78
        failure = server.failure()
        assert failure["reason"] == "CanaryMismatch"
        assert "3 times in a row" in failure["message"]


def test_an_idle_server_whose_canary_stays_wrong_is_unready_at_once_and_restarts(tiny, tmp_path):
    flags = ("--canary-interval-seconds", "1", "--stall-timeout-seconds", "8")
    with Server(tiny, tmp_path, *flags, fault="wrong_canary:after=1") as server:
        server.wait_ready()
        server.wait("not ready", lambda: server.probe("readyz") == 503)
        assert server.reason("readyz") == "CanaryMismatch"
        assert server.wait_end() == 78, "the container restarts without anyone deleting the pod"


@pytest.mark.deep
def test_a_server_whose_weights_are_nan_from_the_start_ends_before_it_serves(tmp_path):
    model = tiny_model.write(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with Server(model, tmp_path) as server:
        assert server.wait_end() == 78
        assert server.failure()["reason"] == "CanaryMismatch"
        assert "no finite number" in server.failure()["message"]


def damage_on_the_disk(model):
    """Weights that are wrong, but finite, in files of the same size and time."""
    path = model / "model.safetensors"
    stat, weights = path.stat(), load_file(path)
    weights["model.norm.weight"] = -weights["model.norm.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_size == stat.st_size


@pytest.mark.deep
def test_a_replica_that_is_damaged_from_its_start_on_never_becomes_ready(tmp_path):
    """Its canary is the same at each run, and another than that of the replica that was ready first."""
    model, golden = tiny_model.write(tmp_path / "model"), tmp_path / "golden.json"
    flags = ("--canary-golden-path", str(golden))
    for name in ("first", "second", "damaged", "other"):
        (tmp_path / name).mkdir()
    with Server(model, tmp_path / "first", *flags) as first:
        kept = first.wait_ready().statusz()["canary"]
        assert len(kept["tokens"]) == 10
        assert "no golden tokens" in first.log.read_text(), "it starts without a file, and says so"
    golden.write_text(json.dumps([{**kept, "pod": "m-0"}]))
    with Server(model, tmp_path / "second", *flags) as second:
        assert second.wait_ready().statusz()["canary"] == kept, "an equal replica is equal"
    damage_on_the_disk(model)
    with Server(model, tmp_path / "damaged", *flags) as damaged:
        assert damaged.wait_end() == 78
        assert damaged.failure()["reason"] == "CanaryMismatch"
        assert "than pod m-0, whose tokens are kept" in damaged.failure()["message"]
    with Server(model, tmp_path / "other", *flags, "--block-size", "32") as other:
        canary = other.wait_ready().statusz()["canary"]
        assert canary["fingerprint"] != kept["fingerprint"], "what may differ is not compared"
        assert canary["tokens"] != kept["tokens"], "the damage was none"
