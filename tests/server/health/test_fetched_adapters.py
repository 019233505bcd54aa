"""What /statusz says of an adapter, by what was fetched of it and what the engine has."""

import json

import pytest

from quire_server.engine.messages import AdapterState
from quire_server.health import engine_report
from quire_server.health.fetched_adapters import _WHY_UNLOADED as WHY_UNLOADED
from quire_server.health.fetched_adapters import merged, read

STATE = {
    "name": "a",
    "state": "Fetching",
    "bytes": 3,
    "total_bytes": 9,
    "reason": "",
    "message": "",
    "revision": "",
}
FETCHED = {**STATE, "state": "Fetched", "bytes": 9, "revision": "c0ffee"}
FAILED = {**STATE, "state": "Failed", "reason": "ModelNotFound", "message": "It is not there."}
READY = {"name": "a", "state": "Ready", "reason": "", "digest": "d", "rank": 4, "bytes": 18}
LOADING = {**READY, "state": "Loading", "digest": "", "rank": 0, "bytes": 0}
BROKEN = {**LOADING, "state": "Failed", "reason": "r is 99."}
UNLOADED = {**LOADING, "state": "Unloaded"}
KEYS = {"name", "state", "reason", "digest", "rank", "bytes", "total_bytes", "revision"}


@pytest.mark.parametrize(
    ("loaded", "fetched", "state", "reason", "numbers", "revision"),
    [
        (None, STATE, "Fetching", "", (3, 9), ""),
        (None, FETCHED, "Loading", "", (9, 9), "c0ffee"),
        (None, FAILED, "Failed", "It is not there.", (3, 9), ""),
        (LOADING, FETCHED, "Loading", "", (0, 0), "c0ffee"),
        (READY, FETCHED, "Ready", "", (18, 18), "c0ffee"),
        (BROKEN, FETCHED, "Failed", "r is 99.", (0, 0), "c0ffee"),
        (READY, None, "Ready", "", (18, 18), ""),
        (UNLOADED, FETCHED, "Unloaded", WHY_UNLOADED, (0, 0), "c0ffee"),
        (UNLOADED, STATE, "Fetching", "", (3, 9), ""),  # it left the list, and is in it again
        # Another content is fetched, or could not be; requests are answered meanwhile.
        (READY, STATE, "Ready", "", (18, 18), ""),
        (READY, FAILED, "Ready", "It is not there.", (18, 18), ""),
        (BROKEN, STATE, "Fetching", "", (3, 9), ""),
        (BROKEN, FAILED, "Failed", "It is not there.", (3, 9), ""),
    ],
)
def test_an_adapter_is_what_a_request_would_find(loaded, fetched, state, reason, numbers, revision):
    (entry,) = merged([loaded] if loaded else [], [fetched] if fetched else [])
    assert entry.keys() == KEYS
    assert (entry["state"], entry["reason"], entry["revision"]) == (state, reason, revision)
    assert (entry["bytes"], entry["total_bytes"]) == numbers


def test_an_adapter_without_files_is_not_named_once_it_is_unloaded():
    assert merged([UNLOADED], []) == []


def test_an_adapter_that_answers_is_ready_while_another_content_of_it_is_loaded(tmp_path):
    state = AdapterState(
        "a", is_ready=True, is_loading=True, load_id="", reason="", digest="d", rank=4, size=18
    )
    cases = [
        (state, "Ready"),
        (state._replace(is_ready=False), "Loading"),
        (state._replace(is_ready=False, is_loading=False), "Failed"),
    ]
    for one, expected in cases:
        engine_report.write_adapters(tmp_path, [one._asdict()])
        assert merged(engine_report.read_adapters(tmp_path), [FETCHED])[0]["state"] == expected


def test_all_names_are_there_and_one_of_the_model_itself_is_failed():
    found = merged([{**READY, "name": "b"}], [FETCHED, {**FETCHED, "name": "tiny"}], ("tiny",))
    assert [(entry["name"], entry["state"]) for entry in found] == [
        ("a", "Loading"),
        ("b", "Ready"),
        ("tiny", "Failed"),
    ]
    assert "as the model itself is" in found[2]["reason"]


def test_files_that_are_no_states_are_left_out(tmp_path):
    assert read(tmp_path / "none") == []
    bad = {
        "text.json": "no JSON",
        "deep.json": "[" * 10_000,
        "list.json": "[]",
        "state.json": json.dumps({**STATE, "state": "Ready"}),
        "number.json": json.dumps({**STATE, "bytes": True}),
        "negative.json": json.dumps({**STATE, "total_bytes": -1}),
        "long.json": json.dumps({**STATE, "message": "x" * 20_000}),
        ".a.json.new": json.dumps(STATE),
    }
    for name, text in bad.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "a.json").write_text(json.dumps(STATE))
    (tmp_path / ".0123456789abcdef.json").write_text(json.dumps({**FAILED, "name": "adapters[2]"}))
    assert [state["name"] for state in read(tmp_path)] == ["adapters[2]", "a"]
