"""Every field of every request at 0, at its bounds and far beyond, against the real server: what the document
excludes is a 400, soon and without memory that stays.
"""

import json
from pathlib import Path

import httpx
import pytest
from jsonschema import Draft202012Validator

from quire_server.api import openapi
from tests.server.api import field_values
from tests.server.conftest import KEY

HEADERS = {"Authorization": f"Bearer {KEY}", "content-type": "application/json"}
MINIMAL = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 1},
    "/v1/completions": {"prompt": "x"},
}
CASES = [(path, name) for path in MINIMAL for name in field_values.properties(openapi.document(), path)]
NUMBERS = [b"0", b"-1", b"2147483648", b"9223372036854775808", b"-9223372036854775809", b"1e308", b"1e999"]
NO_NUMBERS = [b"NaN", b"-NaN", b"Infinity"]
HUGE = [
    b"[" + b"0," * 200_000 + b"0]",
    b"[" + b'"x",' * 200_000 + b'"x"]',
    b"[" + b"[]," * 20_000 + b"[]]",
    b'"' + b"x" * 1_000_000 + b'"',
    b"{" + b",".join(b'"%d":0' % i for i in range(30_000)) + b"}",
    b"9" * 4000,
]
MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, headers=HEADERS, timeout=60) as client:
        yield client


def with_field(path, name, value):
    """A body with one field as raw JSON, which Python's own encoder could not always write."""
    body = {"model": "tiny"} | MINIMAL[path]
    body.pop(name, None)
    return json.dumps(body).encode()[:-1] + b', "%s": %s}' % (name.encode(), value)


@pytest.fixture(scope="module")
def document(client):
    return client.get("/openapi.json").json()


def check_refused(client, path, name, value):
    answer = client.post(path, content=with_field(path, name, value))
    assert answer.status_code in (400, 404) if name == "model" else answer.status_code == 400, value[:40]
    assert answer.json()["error"]["param"].startswith(name), (value[:40], answer.text)
    assert len(answer.content) < 4096


@pytest.mark.parametrize(("path", "name"), CASES, ids=[f"{path}:{name}" for path, name in CASES])
def test_a_value_beyond_its_bounds_is_a_400_that_names_the_field(client, document, path, name):
    """Among them one that is huge; which one differs from field to field."""
    schema = field_values.properties(document, path)[name]
    validator = Draft202012Validator(schema)
    wrong = [value for value in NUMBERS if not validator.is_valid(json.loads(value))]
    wrong += [json.dumps(value).encode() for value in field_values.refused(schema)]
    for value in [*wrong, HUGE[CASES.index((path, name)) % len(HUGE)]]:
        check_refused(client, path, name, value)
    for value in NO_NUMBERS:
        assert client.post(path, content=with_field(path, name, value)).status_code == 400


@pytest.mark.deep
@pytest.mark.parametrize(("path", "name"), CASES, ids=[f"{path}:{name}" for path, name in CASES])
def test_every_huge_value_of_every_field_is_a_400_that_names_it(client, path, name):
    for value in HUGE:
        check_refused(client, path, name, value)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("path", "name"), CASES, ids=[f"{path}:{name}" for path, name in CASES])
def test_a_value_within_its_bounds_never_crashes_the_server(client, document, path, name):
    """Some are refused for what the server or its model is; none ends the engine."""
    schema = field_values.properties(document, path)[name]
    allowed = [json.dumps(value).encode() for value in field_values.accepted(schema)]
    allowed += [value for value in NUMBERS if Draft202012Validator(schema).is_valid(json.loads(value))]
    for value in allowed:
        answer = client.post(path, content=with_field(path, name, value))
        assert answer.status_code in (200, 400, 404, 503), (value[:40], answer.text)
    answer = client.post(path, json={"model": "tiny"} | MINIMAL[path])
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("least", [2**63 - 1, 2**62, 3000])
def test_min_tokens_above_the_context_length_is_a_400_that_names_the_field(client, least):
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "min_tokens": least}
    answer = client.post("/v1/chat/completions", json=chat)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "min_tokens"), answer.text
    assert client.post("/v1/chat/completions", json=chat | {"min_tokens": 1, "max_tokens": 1}).is_success


@pytest.mark.deep
def test_refused_requests_leak_no_memory_in_the_api_process_or_the_engine(server, client):
    def resident():
        pids = server.children()
        return {name: _resident(pids[name]) for name in ("api", "engine")}

    def refuse():
        for path, name in (("/v1/completions", "prompt"), ("/v1/completions", "stop"), *CASES[:6]):
            for value in HUGE[1:]:
                answer = client.post(path, content=with_field(path, name, value))
                assert answer.status_code in (400, 413)

    refuse()  # what an allocator keeps, it has from now on
    before = resident()
    for _ in range(4):
        refuse()
    after = resident()
    assert after["engine"] - before["engine"] < 4 * MEGABYTE
    assert after["api"] - before["api"] < 64 * MEGABYTE


def _resident(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
