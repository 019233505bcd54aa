"""All bodies share one budget of memory: who gets no room is told so, others have room, and what an aborted
or refused request held comes back.
"""

import contextlib
import http.client
import json
import socket

import pytest

from quire_http.body_memory import MEMORY_LIMIT
from quire_http.exchange import MAX_BODY_BYTES
from tests.server.conftest import ADMIN_KEY, KEY

NUM_UNFINISHED = 40


def announce(server, key, sent=b"{"):
    """A connection that has announced the longest body there is, and sent the beginning of it."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
    connection.sendall(f"{head}content-length: {MAX_BODY_BYTES}\r\n\r\n".encode() + sent)
    return connection


def answer_of(connection, seconds):
    """Status, Retry-After and error; None where nothing comes."""
    connection.settimeout(seconds)
    with (
        contextlib.suppress(TimeoutError),
        contextlib.closing(http.client.HTTPResponse(connection)) as response,
    ):
        response.begin()
        return response.status, response.headers["retry-after"], json.loads(response.read())["error"]["code"]
    return None


def refused(server):
    return server.metric("llm_requests_refused_total", reason="body_memory")


def greatest(server, key):
    """The answer to a body of nearly the greatest length, of one text with one wide character."""
    text = "\N{GRINNING FACE}".ljust(MAX_BODY_BYTES - 1000, "a")
    body = json.dumps({"model": "tiny", "prompt": text}, ensure_ascii=False).encode()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", body, {"authorization": f"Bearer {key}"})
        with connection.getresponse() as response:
            return response.status, json.loads(response.read())["error"]["code"]


def test_bodies_beyond_the_budget_are_a_503_with_a_reason_and_another_key_has_room(server):
    before = refused(server)
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(announce(server, KEY)) for _ in range(NUM_UNFINISHED)]
        num_held = MEMORY_LIMIT // 2 // (2 * MAX_BODY_BYTES)
        expected = NUM_UNFINISHED - num_held
        server.wait("all but a few are refused", lambda: refused(server) - before >= expected)
        assert refused(server) - before == expected
        for connection in opened[num_held:]:
            assert answer_of(connection, 20) == (503, "1", "body_memory")
        assert answer_of(opened[0], 0.2) is None, "it is being read"
        body = {"model": "tiny", "prompt": "x" * 1000, "max_tokens": 1}
        assert server.post("/v1/completions", body, key=ADMIN_KEY).status_code == 200
        assert server.post("/v1/completions", body, key=KEY).status_code == 200, "a small one"


@pytest.mark.parametrize("ends", ["aborted", "refused", "answered"])
def test_what_a_request_held_comes_back(server, ends):
    """If anything of forty bodies were still held, the greatest body would have no room."""
    before = server.metric("llm_requests_total", status="aborted")
    for number in range(NUM_UNFINISHED):
        if ends == "aborted":
            announce(server, KEY, b'{"prompt": "\xf0\x9f\x98\x80' + b"a" * 1000).close()
            server.wait(
                "it is noticed",
                lambda least=before + number + 1: (
                    server.metric("llm_requests_total", status="aborted") >= least
                ),
            )
        elif ends == "refused":
            assert server.post("/v1/completions", {"x": "y" * 1_000_000}, key=KEY).status_code == 400
        else:
            body = {"model": "tiny", "prompt": "x" * 1500, "max_tokens": 1, "user": "u" * 200}
            assert server.post("/v1/completions", body, key=KEY).status_code == 200
    assert greatest(server, KEY) == (400, "context_length_exceeded")


def test_a_length_that_is_too_long_is_refused_before_anything_of_it_is_read(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\n" % KEY.encode()
        connection.sendall(head + b"content-length: %d\r\n\r\n" % (MAX_BODY_BYTES + 1))
        assert answer_of(connection, 5)[0] == 413


def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(server):
    ids = b'{"model": "tiny", "prompt": [' + b"1," * 1_500_000
    with announce(server, KEY, ids[: MAX_BODY_BYTES // 2]) as connection:
        assert answer_of(connection, 20) == (400, None, None), "half of it has come"


def test_a_text_is_refused_by_its_length_and_a_long_one_that_fits_is_tokenised(server):
    ask = {"model": "tiny", "prompt": "x" * 4_000_000}
    refused = server.post("/v1/completions", ask, key=KEY).json()["error"]
    assert (refused["code"], refused["param"]) == ("context_length_exceeded", "prompt")
    assert "4000000 characters" in refused["message"] and "tokens at least" in refused["message"]
    fits = server.post("/tokenize", {"model": "tiny", "prompt": "xy" * 60_000}, key=KEY).json()
    assert (fits["count"], len(fits["tokens"])) == (120_000, 120_000)
    back = server.post("/detokenize", {"model": "tiny", "tokens": fits["tokens"]}, key=KEY).json()
    assert back["prompt"] == "xy" * 60_000
    more = server.post("/tokenize", {"model": "tiny", "prompt": "x" * 140_000}, key=KEY)
    assert more.status_code == 400 and "140000 tokens" in more.json()["error"]["message"]
    many = server.post("/detokenize", {"model": "tiny", "tokens": [1] * 140_000}, key=KEY)
    assert (many.status_code, many.json()["error"]["param"]) == (400, "tokens")
