"""What clients see of a gateway before two real engines: the answers of the engines, unchanged."""

import hashlib
import json
import socket
import time

import httpx
import openai
import pytest

from tests.gateway.conftest import slice_of
from tests.gateway.kube_stub import llm_object
from tests.server.launch import NO_TLS

CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Once upon a time"}],
    "max_tokens": 20,
    "temperature": 0,
}
LONG = {**CHAT, "max_tokens": 2000, "ignore_eos": True}
PATHS = {"/v1/chat/completions": CHAT, "/v1/completions": {**CHAT, "prompt": "Once"}}
del PATHS["/v1/completions"]["messages"]


def text_of(answer):
    """The text of an answer. How many tokens an event has differs between any two."""
    documents = [json.loads(line.removeprefix("data: ")) for line in answer.splitlines() if "{" in line]
    choices = [choice for each in documents for choice in each["choices"]]
    messages = [choice.get("message") or choice.get("delta") or choice for choice in choices]
    return "".join(message.get("content") or message.get("text") or "" for message in messages)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_the_engines_own(shared, engines, path, stream):
    body = {**PATHS[path], "stream": stream}
    relayed, direct = shared.post(path, body), engines[0].post(path, body)
    assert relayed.status_code == direct.status_code == 200
    assert text_of(relayed.text) == text_of(direct.text) != ""
    assert relayed.text.endswith("data: [DONE]\n\n") == stream
    kept = {"content-type", "cache-control", "x-accel-buffering"}
    assert {**relayed.headers}.items() >= {k: v for k, v in direct.headers.items() if k in kept}.items()


def test_the_openai_client_works_unchanged(shared):
    with shared.client() as client:
        assert [one.id for one in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").id == "tiny"
        whole = client.chat.completions.create(**CHAT)
        chunks = list(client.chat.completions.create(**CHAT, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == whole.choices[0].message.content
        with pytest.raises(openai.NotFoundError, match="there is tiny"):
            client.chat.completions.create(**{**CHAT, "model": "other"})
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.chat.completions.create(**{**CHAT, "temperature": -1})


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/chat/completions", 405), ("POST", "/nothing", 404), ("GET", "/nothing", 404)],
)
def test_what_is_not_served_is_said_in_openais_shape_with_a_request_id(shared, method, path, status):
    answer = httpx.request(method, shared.url + path, headers={"x-request-id": "mine"}, verify=NO_TLS)
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert answer.headers["x-request-id"] == "mine"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_goes_where_its_beginning_is_cached_and_the_answer_proves_it(shared, stream):
    story = f"{stream} tale. " * 110  # more than a block, less than the model can read
    body = {**CHAT, "max_tokens": 2, "stream": stream}
    before = len(shared.requests())
    for question in ("Who?", "When?", "Why?"):
        body["messages"] = [{"role": "system", "content": story}, {"role": "user", "content": question}]
        assert shared.post("/v1/chat/completions", body).status_code == 200
    lines = shared.wait_requests(3, before)
    assert len({line["replicas"][0] for line in lines}) == 1
    assert lines[0]["cached_tokens"] == 0
    assert lines[1]["cached_tokens"] > 100 and lines[2]["cached_tokens"] > 100
    labels = {"model": "tiny", "predicted": "hit", "actual": "hit"}
    assert shared.metric("gateway_prefix_predictions_total", **labels) >= 2


def test_requests_are_spread_over_the_replicas_and_logged_without_their_text(shared):
    before = len(shared.requests())
    for number in range(20):
        body = {**CHAT, "messages": [{"role": "user", "content": f"Once upon a time {number}"}]}
        assert shared.post("/v1/chat/completions", body).status_code == 200
    lines = shared.wait_requests(20, before)
    assert {uid for line in lines for uid in line["replicas"]} == {"one", "two"}
    assert all(line["outcome"] == "success" and line["status"] == 200 for line in lines)
    assert shared.metric("gateway_requests_total", model="tiny", status="success") >= 20
    assert "Once upon" not in shared.log.read_text()


def send_and_wait(gateway, engines, body):
    """A connection with a request that an engine computes."""
    text = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(text)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", gateway.port))
    connection.sendall(head.encode() + text)
    gateway.wait("the engine computes", lambda: sum(one.statusz()["running"] for one in engines))
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_frees_the_engine_within_a_second(shared, engines, stream):
    aborted = {"model": "tiny", "status": "aborted"}
    shared.post("/v1/chat/completions", CHAT)
    with send_and_wait(shared, engines, {**LONG, "stream": stream}):
        pass
    begun = time.monotonic()
    shared.wait("the row is free", lambda: not sum(one.statusz()["running"] for one in engines))
    seconds = time.monotonic() - begun
    shared.wait("the request is over", lambda: shared.metric("gateway_requests_in_flight") == 0)
    assert shared.metric("gateway_requests_total", **aborted) >= 1
    assert seconds < 1 or shared.requests()[-1]["seconds"] < 2  # a busy machine may show it late


def test_a_replica_gets_no_header_that_is_not_meant_for_it(start, engines, proxy):
    gateway = start(slice_of("one", engines[0], proxy.port))
    secrets = {"authorization": "Bearer s3cret", "cookie": "a=s3cret", "x-quire-priority": "s3cret"}
    headers = {**secrets, "x-request-id": "mine", "traceparent": f"00-{1:032x}-{1:016x}-01"}
    answer = httpx.post(
        gateway.url + "/v1/chat/completions", json=CHAT, headers=headers, timeout=60, verify=NO_TLS
    )
    assert answer.headers["x-request-id"] == "mine"
    (head, *_) = b"".join(proxy.requests).split(b"\r\n\r\n")
    assert b"s3cret" not in head
    names = {line.split(b":")[0].lower() for line in head.split(b"\r\n")[1:]}
    expected = {b"host", b"accept", b"content-type", b"content-length", b"x-request-id", b"traceparent"}
    assert names == expected | {b"x-quire-usage"}


def test_a_body_goes_to_the_replica_byte_by_byte_as_it_came(start, engines, proxy):
    gateway = start(slice_of("one", engines[0], proxy.port))
    body = b'{ "model" : "tiny", "prompt":"\\u00e9\xc3\xa9", "max_tokens": 1, "seed": 1e0,\t"n": 1}\n'
    answer = httpx.post(gateway.url + "/v1/completions", content=body, timeout=60, verify=NO_TLS)
    assert b"".join(proxy.requests).endswith(b"\r\n\r\n" + body), answer.text


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_the_bytes_of_a_stream_are_passed_on_unchanged_however_they_are_split(start, engines, proxy, piece):
    gateway = start(slice_of("one", engines[0], proxy.port))
    stream = ': waiting\n\nevent: a\ndata: {"t": "\u00e9\u6f22\U0001f642"}\n\ndata: x\n\nno end'.encode()
    pieces = [stream[at : at + piece] for at in range(0, len(stream), piece)]
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    chunks = [b"%x\r\n%b\r\n" % (len(each), each) for each in pieces]
    proxy.answer = head + b"".join(chunks) + b"0\r\n\r\n"
    assert gateway.post("/v1/chat/completions", {**CHAT, "stream": True}).content == stream


def test_no_more_tokens_are_reserved_for_an_answer_than_the_models_context_has(kube, start, engines):
    key = hashlib.sha256(b"sk-alice").hexdigest()
    kube.put(llm_object("LLMClient", "alice", {"keyHashes": [key], "limits": {"tokensPerMinute": 10_000}}))
    gateway = start(slice_of("a", engines[0]))
    headers = {"authorization": "Bearer sk-alice"}

    def left():
        body = {**CHAT, "max_tokens": 10**6}
        answer = httpx.post(
            gateway.url + "/v1/chat/completions", json=body, headers=headers, timeout=60, verify=NO_TLS
        )
        return int(answer.headers["x-ratelimit-remaining-tokens"])

    assert gateway.wait("the context is known", left) > 7_000
