"""Requests generated from the OpenAPI document, valid and invalid, against the real server: each gets what
the document says, and after each the server still computes what it computed before.
"""

import contextlib
import json
import os
import time

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi import checks

from quire_server.api import openapi
from quire_server.api.routes import POOLING_PATHS
from tests.examples import examples
from tests.server import tiny_model
from tests.server.conftest import KEY
from tests.server.embeddings import embedders
from tests.server.launch import NO_TLS, Server
from tests.server.serving import mutated_bodies

HEADERS = {"Authorization": f"Bearer {KEY}"}
CANARY = {"model": "tiny", "prompt": "Once upon", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
# What a 503 may say to a request that comes alone.
REFUSALS = {"deadline_exceeded", "memory_pressure"}
SECONDS_EACH = 5.0
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "10"))
OPERATIONS = [
    (task, method, path, mode)
    for task in ("generate", "embed")
    for path, item in openapi.document(task=task)["paths"].items()
    for method, operation in item.items()
    for mode in GenerationMode
    if mode is GenerationMode.POSITIVE or "requestBody" in operation or "parameters" in operation
    if task == "generate" or path in POOLING_PATHS
]
OF_A_CODER = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")  # it takes a suffix
# Generated names are of no adapter, and of no directory.
OF_ADAPTERS = {"/v1/load_lora_adapter": 400, "/v1/unload_lora_adapter": 404}
CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.response_headers_conformance,
    checks.ignored_auth,
    checks.unsupported_method,
]


@pytest.fixture(scope="module")
def fuzzed(tiny, tmp_path_factory):
    """A server with answers of at most half a second, and its answer to a reference request."""
    directory = tmp_path_factory.mktemp("fuzzed")
    flags = ("--max-adapters", "1", "--adapters-dir", str(directory), "--request-timeout-seconds", "0.5")
    with started(tiny, directory, *flags) as server:
        yield server, golden(server)


@pytest.fixture(scope="module")
def patient(tmp_path_factory):
    """A server of a model that fills in the middle, with time for each answer, and its answer as above."""
    model = tiny_model.write(tmp_path_factory.mktemp("models") / "coder", tokens=OF_A_CODER)
    with started(model, tmp_path_factory.mktemp("patient")) as server:
        yield server, golden(server)


@pytest.fixture(scope="module")
def fuzzed_embedder(tmp_path_factory):
    """The same of a model that embeds texts, which never takes long."""
    model = embedders.write(tmp_path_factory.mktemp("models") / "bert", "bert", pooling="mean_tokens")
    with started(model, tmp_path_factory.mktemp("fuzzed-embedder"), "--task", "embed") as server:
        yield server, golden_vector(server)


@contextlib.contextmanager
def started(model, directory, *more):
    (directory / "keys").mkdir()
    (directory / "keys" / "alice").write_text(f"{KEY}\nadmin: true\n")  # so that every route answers
    with Server(model, directory, "--api-keys-dir", str(directory / "keys"), *more) as server:
        yield server.wait_ready()


def send(server, path, **body):
    return httpx.post(server.url + path, headers=HEADERS, timeout=60, verify=NO_TLS, **body)


def golden(server):
    answer = send(server, "/v1/completions", json=CANARY)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def golden_vector(server):
    answer = send(server, "/v1/embeddings", json={"model": "tiny", "input": "a b c"})
    assert answer.status_code == 200, answer.text
    return answer.json()["data"][0]["embedding"]


def document(server):
    return httpx.get(server.url + "/openapi.json", headers=HEADERS, verify=NO_TLS).json()


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("task", "method", "path", "mode"), OPERATIONS, ids=[" ".join(map(str, one)) for one in OPERATIONS]
)
def test_every_response_conforms_to_the_openapi_document(request, task, method, path, mode):
    server, expected = request.getfixturevalue("fuzzed" if task == "generate" else "fuzzed_embedder")
    again = golden if task == "generate" else golden_vector
    operation = schemathesis.openapi.from_dict(document(server))[path][method]
    end, statuses = time.monotonic() + SECONDS_EACH, []
    expects = [checks.negative_data_rejection] if mode is GenerationMode.NEGATIVE else []

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def fuzz(case):
        if time.monotonic() > end:
            return
        response = case.call(base_url=server.url, headers=HEADERS, timeout=60)
        statuses.append(response.status_code)
        case.validate_response(response, checks=[*CHECKS, *expects], headers=HEADERS)
        if response.status_code >= 500:
            assert response.status_code == 503 and response.json()["error"]["code"] in REFUSALS, response.text
        elif response.status_code >= 400:
            assert response.json()["error"]["message"]
        assert again(server) == expected

    fuzz()
    usual = OF_ADAPTERS.get(path, 404 if "response_id" in path else 200)  # of responses none is kept
    assert usual in statuses if mode is GenerationMode.POSITIVE else statuses


SAID = {"messages": [{"role": "user", "content": "a"}]}
USAGE = {"n": 2, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    ("path", "body", "end"),
    [
        ("/v1/completions", {"prompt": "a", "logprobs": 1}, "data: [DONE]"),
        ("/v1/completions", {"prompt": "a", "logprobs": 1, **USAGE}, "data: [DONE]"),
        ("/v1/chat/completions", {**SAID, "logprobs": True}, "data: [DONE]"),
        ("/v1/chat/completions", {**SAID, "logprobs": True, **USAGE}, "data: [DONE]"),
        ("/v1/responses", {"input": "a", "max_tokens": None, "max_output_tokens": 4}, "}}"),
        ("/v1/messages", SAID, 'event: message_stop\ndata: {"type":"message_stop"}'),
    ],
)
def test_every_event_of_a_stream_conforms_to_the_openapi_document(fuzzed, path, body, end):
    server, _ = fuzzed
    operation = schemathesis.openapi.from_dict(document(server))[path]["post"]
    case = operation.Case(
        body={"model": "tiny", "stream": True, "max_tokens": 4, **body}, media_type="application/json"
    )
    response = case.call(base_url=server.url, headers=HEADERS, timeout=60)
    assert response.status_code == 200 and response.text.endswith(f"{end}\n\n"), response.text
    case.validate_response(response, checks=CHECKS[:4])


NASTY = [
    b'{"model": "tiny", "prompt": "\\u0000"}',
    b'{"model": "tiny", "prompt": "a\x00b"}',
    b'{"model": "tiny", "prompt": "\\ud800"}',
    b'{"model": "tiny", "prompt": "\\udfff\\ud800"}',
    b'{"model": "\\ud800", "prompt": "x"}',
    b'{"\\ud800": 1, "model": "tiny", "prompt": "x"}',
    b'{"model": "tiny", "prompt": "x", "stop": ["\\u0000"]}',
    b'{"model": "tiny", "prompt": "x", "cache_salt": "\\u0000\\uffff"}',
    b'{"model": "tiny", "prompt": "\xff\xfe"}',
    b'{"model": "tiny", "prompt": "\xed\xa0\x80"}',
    b"[" * 200_000,
    b'{"a":' * 200_000,
    b'{"model": "tiny", "prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    b'{"model": "tiny", "prompt": "x", "seed": ' + b"9" * 100_000 + b"}",
    b'{"model": "tiny", "prompt": "x", "temperature": 1e999}',
    b'{"model": "tiny", "prompt": "x", "temperature": -1e999}',
    b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
    b'{"model": "tiny", "prompt": "x", "temperature": -Infinity}',
    b'{"model": "tiny", "model": "other", "prompt": "x"}',
    b"\xef\xbb\xbf{}",
    b"null",
    b"",
]


@pytest.mark.parametrize(
    "path",
    ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize", "/detokenize"],
)
def test_hostile_bodies_are_answered_and_do_not_change_later_answers(fuzzed, path):
    server, expected = fuzzed
    for body in NASTY:
        answer = send(server, path, content=body)
        assert answer.status_code in (200, 400, 404), (body[:80], answer.text[:300])
        if answer.status_code != 200:
            assert answer.json()["error"]["message"]
        assert golden(server) == expected, body[:80]


# Of an error, where it is not OpenAI's.
SHAPES = dict.fromkeys(("/v1/messages", "/v1/messages/count_tokens"), {"type", "error", "request_id"})
DOORS = [
    pytest.param(fixture, path, body, id=f"{path} {number}")
    for fixture, bodies in (
        ("patient", mutated_bodies.GENERATING),
        ("fuzzed_embedder", mutated_bodies.POOLING),
    )
    for number, (path, body) in enumerate(bodies)
]


@pytest.mark.deep
@pytest.mark.parametrize(("fixture", "path", "body"), DOORS)
def test_a_body_with_one_odd_value_is_answered_or_refused_and_leaves_nothing_behind(
    request, fixture, path, body
):
    """Once at each place of the body."""
    server, expected = request.getfixturevalue(fixture)
    again = golden if fixture == "patient" else golden_vector
    with httpx.Client(base_url=server.url, headers=HEADERS, timeout=60, verify=NO_TLS) as client:
        if mutated_bodies.PREVIOUS in body.values():
            kept = client.post("/v1/responses", json={"model": "tiny", "input": "a", "max_output_tokens": 2})
            body = {**body, "previous_response_id": kept.json()["id"]}
        valid = client.post(path, json=body)
        assert valid.status_code == 200 and not error_events(valid), valid.text
        for place, content in mutated_bodies.mutations(body):
            answer = client.post(path, content=content)
            about = (path, place, content[:2000], answer.status_code, answer.text)
            if answer.status_code == 200:
                assert not error_events(answer), about
                continue
            assert answer.status_code in (400, 404, 413, 422), about
            document = answer.json()
            assert document["error"]["message"] and document["error"]["type"], about
            assert document.keys() == SHAPES.get(path, {"error"}), about
    assert again(server) == expected
    if fixture == "patient":
        assert send(server, "/reset_prefix_cache").status_code == 200  # lets go of what a client pinned
        server.wait("all KV blocks are free", lambda: server.metric("llm_kv_cache_utilization") == 0)
    server.wait("it is idle", lambda: not any(server.statusz()[name] for name in ("queued", "running")))
    assert "Traceback" not in server.log.read_text()


def error_events(answer):
    """The events of a stream that say that it failed."""
    lines = answer.text.splitlines() if "event-stream" in answer.headers["content-type"] else ()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    events = [json.loads(one) for one in data if one != "[DONE]"]
    return [one for one in events if one.get("error") or one.get("type") in ("error", "response.failed")]


@settings(max_examples=examples(150), deadline=None, database=None, derandomize=True)
@given(text=st.text(st.characters(), max_size=40))
def test_any_text_survives_tokenize_and_detokenize(fuzzed, text):
    """Whole code points, \\x00 and lone surrogates included: those are no text, and refused."""
    server, _ = fuzzed
    body = json.dumps({"prompt": text, "add_special_tokens": False})
    answer = send(server, "/tokenize", content=body)
    try:
        text.encode()
    except UnicodeEncodeError:
        assert answer.status_code == 400
        return
    tokens = answer.json()["tokens"]
    back = send(server, "/detokenize", json={"tokens": tokens})
    assert back.json()["prompt"] == text
