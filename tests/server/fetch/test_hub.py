"""``quire-server fetch hf://...`` against an HTTP server with the hub's API."""

import contextlib
import json
import os
import subprocess
import sys
import threading

import pytest

from quire_server.model_dir.files import ModelFiles
from tests.server.fetch import published
from tests.server.fetch.hub_server import COMMIT, SIGNATURE, cut, once, reply

SOURCE = "hf://org/tiny@main"
SHARD = published.SHARDS[0]


@pytest.fixture
def place(tmp_path):
    return tmp_path / "volume" / "model"


def contents(directory):
    return {
        path.name: path.read_bytes() for path in directory.iterdir() if path.name != "quire-manifest.json"
    }


def wanted(hub):
    return {name: hub.files[name] for name in published.WANTED}


def test_a_model_arrives_whole_with_a_manifest_and_nothing_else(hub, fetch, place):
    outcome = fetch(SOURCE, HF_ENDPOINT=hub.endpoint)
    assert (outcome.code, outcome.error) == (0, "")
    assert contents(place) == wanted(hub)
    assert ModelFiles.open(place).read("config.json", 1000) == hub.files["config.json"]
    manifest = json.loads((place / "quire-manifest.json").read_text())
    assert {name: entry["sha256"] for name, entry in manifest["files"].items()} == {
        name: published.sha256(data) for name, data in wanted(hub).items()
    }
    assert manifest["revision"] == COMMIT
    leftovers = {path.name for path in place.parent.iterdir()}
    assert leftovers == {"model", ".model.lock"}


def test_the_result_has_the_digests_and_progress_is_written(hub, fetch, place, tmp_path):
    outcome = fetch(SOURCE, "--progress-file", str(tmp_path / "progress"), HF_ENDPOINT=hub.endpoint)
    result = json.loads(outcome.log)
    assert result["files"][SHARD] == published.sha256(hub.files[SHARD])
    assert result["digest"] == json.loads((place / "quire-manifest.json").read_text())["digest"]
    assert result == outcome.lines[-1]
    size = sum(map(len, wanted(hub).values()))
    newest = json.loads((tmp_path / "progress").read_text())
    assert (newest["phase"], newest["loadedBytes"], newest["totalBytes"]) == ("done", size, size)


def test_a_second_run_sends_no_request(hub, fetch):
    fetch(SOURCE, HF_ENDPOINT=hub.endpoint)
    hub.requests.clear()
    outcome = fetch(SOURCE)
    assert (outcome.code, hub.requests) == (0, [])
    assert json.loads(outcome.log)["revision"] == COMMIT


def test_only_a_file_damaged_in_the_volume_is_fetched_again(hub, fetch, place):
    fetch(SOURCE, HF_ENDPOINT=hub.endpoint)
    rotten = bytearray(hub.files[SHARD])
    rotten[1000] ^= 1
    (place / SHARD).write_bytes(rotten)
    hub.sent.clear()
    assert fetch(SOURCE).code == 0
    assert contents(place) == wanted(hub)
    assert set(hub.sent) == {SHARD}


def test_a_directory_of_another_origin_is_not_touched(hub, fetch, place):
    place.mkdir(parents=True)
    (place / "thesis.tex").write_text("years of work")
    outcome = fetch(SOURCE, HF_ENDPOINT=hub.endpoint)
    assert outcome.code == 2
    assert "Remove it, or name another" in outcome.error
    assert contents(place) == {"thesis.tex": b"years of work"}


def test_a_truncated_body_is_resumed_at_its_end(hub, fetch, place):
    hub.faults[SHARD] = once(cut)
    assert fetch(SOURCE, HF_ENDPOINT=hub.endpoint).code == 0
    assert contents(place) == wanted(hub)
    assert hub.sent[SHARD] == len(hub.files[SHARD]) - len(hub.files[SHARD]) // 2


def test_a_server_without_ranges_is_read_from_the_start_again(hub, fetch, place):
    hub.ignores_ranges = True
    hub.faults[SHARD] = once(cut)
    assert fetch(SOURCE, HF_ENDPOINT=hub.endpoint).code == 0
    assert contents(place) == wanted(hub)


def test_a_busy_hub_is_retried(hub, fetch):
    hub.listing_status = [(503, {}), (429, {"Retry-After": "0"})]
    assert fetch(SOURCE, attempts=4, HF_ENDPOINT=hub.endpoint).code == 0


def _says_403(handler, data):
    reply(handler, 403, b"")
    return True


FAILURES = {
    "cut for ever": (
        lambda hub: hub.faults.update({SHARD: lambda h, d: cut(h, b"")}),
        69,
        "broke off after 0 of",
    ),
    "other bytes than promised": (
        lambda hub: hub.promised.update({SHARD: "0" * 64}),
        65,
        "its source promises 0000",
    ),
    "a git file of other bytes": (
        lambda hub: hub.faults.update({"config.json": lambda h, d: reply(h, 200, d[::-1]) or True}),
        65,
        "git-sha1",
    ),
    "no token": (lambda hub: setattr(hub, "token", "t"), 77, "Give a token"),
    "no such model": (
        lambda hub: hub.listing_status.append((404, {"X-Error-Code": "RevisionNotFound"})),
        66,
        "revision",
    ),
    "storage that refuses": (lambda hub: hub.faults.update({SHARD: _says_403}), 69, "answered 403"),
    "more than any disk": (
        lambda hub: hub.announced.update({SHARD: 1 << 50}),
        73,
        "Enlarge the volume by at least",
    ),
    "a longer body": (lambda hub: hub.announced.update({SHARD: 1000}), 69, "longer than the 1000 bytes"),
    "a missing shard": (lambda hub: hub.files.pop(SHARD), 65, "which the source does not have"),
    "no model at all": (lambda hub: hub.files.pop("config.json"), 66, "no config.json"),
    "pickles only": (
        lambda hub: hub.files.pop("model.safetensors.index.json"),
        2,
        "pickled weights are refused",
    ),
    "a down hub": (lambda hub: hub.listing_status.extend([(500, {})] * 9), 69, "answered 500"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_each_cause_has_its_exit_code_and_message(name, hub, fetch, place):
    break_it, code, words = FAILURES[name]
    break_it(hub)
    outcome = fetch(SOURCE, HF_ENDPOINT=hub.endpoint)
    assert outcome.code == code
    assert words in outcome.error
    assert json.loads(outcome.log)["exitCode"] == code
    assert not place.exists()


def test_a_silent_server_times_out(hub, fetch):
    silence = threading.Event()
    hub.before_piece = silence.wait
    try:
        outcome = fetch(SOURCE, attempts=1, stall=0.3, HF_ENDPOINT=hub.endpoint)
    finally:
        silence.set()
    assert outcome.code == 69
    assert "sent nothing for 0.3 seconds" in outcome.error


def _trickle(ended):
    """Sends a byte now and then until the client closes the connection."""

    def answer(handler, data):
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        with contextlib.suppress(OSError):
            for byte in data:
                handler.wfile.write(bytes([byte]))
                ended.wait(0.01)
        handler.close_connection = True
        return True

    return answer


def test_a_slow_connection_is_closed_and_another_one_resumes(hub, fetch, place):
    hub.faults[SHARD] = once(_trickle(threading.Event()))
    assert fetch(SOURCE, stall=0.3, HF_ENDPOINT=hub.endpoint).code == 0
    assert contents(place) == wanted(hub)
    asked = [headers for _, path, headers in hub.requests if path.startswith(f"/{SHARD}?")]
    assert len(asked) == 2
    assert int(asked[1]["Range"].removeprefix("bytes=").rstrip("-")) > 0


def test_a_source_that_is_always_slow_fails(hub, fetch, place):
    ended = threading.Event()
    hub.faults[SHARD] = _trickle(ended)
    outcome = fetch(SOURCE, attempts=2, stall=0.3, HF_ENDPOINT=hub.endpoint)
    assert outcome.code == 69
    assert "bytes/s" in outcome.error
    assert not place.exists()


def test_a_directory_whose_manifest_is_damaged_is_fetched_again(hub, fetch, place):
    assert fetch(SOURCE, HF_ENDPOINT=hub.endpoint).code == 0
    manifest = place / "quire-manifest.json"
    good = manifest.read_bytes()
    manifest.write_bytes(good[1:])
    assert fetch(SOURCE, HF_ENDPOINT=hub.endpoint).code == 0
    assert manifest.read_bytes() == good
    assert contents(place) == wanted(hub)


def test_an_unreachable_hub_is_named(fetch):
    outcome = fetch(SOURCE, attempts=1, HF_ENDPOINT="http://127.0.0.1:9")
    assert outcome.code == 69
    assert "HTTPS_PROXY" in outcome.error


@pytest.mark.parametrize("name", ["../escape.safetensors", "/etc/escape.safetensors", "a/../../config.json"])
def test_no_file_name_escapes_the_directory(name, hub, fetch, place, tmp_path):
    hub.extra_siblings.append({"rfilename": name, "size": 3, "blobId": "0" * 40})
    assert fetch(SOURCE, HF_ENDPOINT=hub.endpoint).code == 0
    assert contents(place) == wanted(hub)
    assert list(tmp_path.rglob("escape*")) == []


def test_two_fetchers_do_the_work_once(hub, fetch, place):
    gate = threading.Event()
    hub.before_piece = gate.wait
    codes = []
    environment = {"HF_ENDPOINT": hub.endpoint}
    threads = [threading.Thread(target=lambda: codes.append(_quietly(place, environment))) for _ in range(2)]
    for thread in threads:
        thread.start()
    gate.set()
    for thread in threads:
        thread.join()
    assert codes == [0, 0]
    assert hub.sent[SHARD] == len(hub.files[SHARD])
    assert contents(place) == wanted(hub)


def _quietly(place, environment):
    command = [sys.executable, "-m", "quire_server", "fetch", SOURCE, "--to", str(place)]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, check=False
    ).returncode


def test_the_token_is_sent_only_to_the_hub_and_never_logged(hub, fetch, place):
    hub.token = "hf_canary_token"
    hub.faults[SHARD] = _says_403
    environment = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": f"{hub.token}\n"}
    failed = fetch(SOURCE, **environment)
    hub.faults.clear()
    worked = fetch(SOURCE, **environment)
    hub.token = "hf_another"
    refused = fetch(SOURCE, to=place.with_name("other"), **environment)
    assert (failed.code, worked.code, refused.code) == (69, 0, 77)
    everything = repr((failed, worked, refused)) + "".join(
        path.read_text(errors="replace") for path in place.parent.rglob("*") if path.is_file()
    )
    assert "canary" not in everything
    assert SIGNATURE not in everything
    asked = {host for host, _, headers in hub.requests if "Authorization" in headers}
    assert asked == {"hub"}


def test_the_files_that_say_how_an_embedder_pools_arrive_and_nothing_else_of_a_folder(hub, fetch, place):
    more = {
        "modules.json": b"[]",
        "1_Pooling/config.json": b"{}",
        "1_Pooling/notes.md": b"",
        "2_Dense/config.json": b"",
    }
    hub.files |= more
    assert fetch(SOURCE, HF_ENDPOINT=hub.endpoint).code == 0
    model = ModelFiles.open(place)
    assert model.read("1_Pooling/config.json", 10) == b"{}" and model.exists("modules.json")
    assert sorted(path.name for path in place.iterdir() if path.is_dir()) == ["1_Pooling"]
    assert [path.name for path in (place / "1_Pooling").iterdir()] == ["config.json"]
    (place / "1_Pooling" / "config.json").write_bytes(b"!!")
    assert fetch(SOURCE, HF_ENDPOINT=hub.endpoint).code == 0
    assert ModelFiles.open(place).read("1_Pooling/config.json", 10) == b"{}"
