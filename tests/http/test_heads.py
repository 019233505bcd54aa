"""What a request is, and where it ends, does not depend on how its bytes were split into segments; what a
proxy could understand in another way is refused.
"""

import asyncio
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.config import Config
from uvicorn.server import ServerState

from quire_http.protocol import MAX_HEADER_BYTES, Connection
from tests.http.test_protocol import Transport, settings

SECOND = b"GET /second HTTP/1.1\r\nHost: x\r\n\r\n"
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"


def post(headers, body=b""):
    return b"POST /first HTTP/1.1\r\nHost: x\r\nX-Request-Id: given\r\n" + headers + b"\r\n" + body


LENGTH = b"Content-Length: %d\r\n" % len(SECOND)
#: Each with the answers to it: the status, and what the application saw. A body that looks like a request
#: shows that it was not taken for one.
SERVED = {
    "two in a row": (SECOND + SECOND, ["200 GET /second", "200 GET /second"]),
    "a body": (post(LENGTH, SECOND) + SECOND, [f"200 POST /first {len(SECOND)}", "200 GET /second"]),
    "chunks": (post(CHUNKED, b"2\r\nab\r\n0\r\n\r\n") + SECOND, ["200 POST /first 2", "200 GET /second"]),
    "a trailer": (
        post(CHUNKED, b"2\r\nab\r\n0\r\nAuthorization: Bearer x\r\n\r\n") + SECOND,
        ["200 POST /first 2", "200 GET /second"],
    ),
    "a trailer that ends the connection": (
        post(CHUNKED, b"2\r\nab\r\n0\r\nConnection: close\r\n\r\n") + SECOND,
        ["200 POST /first 2", "closed"],
    ),
    "a trailer that offers another protocol": (
        post(CHUNKED, b"2\r\nab\r\n0\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n") + SECOND,
        ["200 POST /first 2", "200 GET /second"],
    ),
    "HTTP/1.0 without a host": (b"GET /second HTTP/1.0\r\n\r\n", ["200 GET /second", "closed"]),
    "upgrade": (post(UPGRADE + LENGTH, SECOND) + SECOND, [f"200 POST /first {len(SECOND)}", "closed"]),
    "upgrade, chunks": (
        post(UPGRADE + CHUNKED, b"2\r\nab\r\n0\r\n\r\n") + SECOND,
        ["200 POST /first 2", "closed"],
    ),
    "upgrade without a body": (post(UPGRADE) + SECOND, ["200 POST /first 0", "closed"]),
    "the last one": (post(b"Connection: close\r\n") + SECOND, ["200 POST /first 0", "closed"]),
    "then nonsense": (SECOND + b"\0\0\0\0", ["200 GET /second", "400", "closed"]),
}
REFUSED = {
    "length and chunks": post(LENGTH + CHUNKED, SECOND),
    "chunks and length": post(CHUNKED + LENGTH, b"0\r\n\r\n" + SECOND),
    "two lengths": post(LENGTH + LENGTH, SECOND),
    "a list of lengths": post(b"Content-Length: 2, 2\r\n", SECOND),
    "a signed length": post(b"Content-Length: +2\r\n", SECOND),
    "an endless length": post(b"Content-Length: " + b"9" * 30 + b"\r\n", SECOND),
    "an empty length": post(b"Content-Length:\r\n", SECOND),
    "a space before the colon": post(b"Content-Length : 2\r\n", SECOND),
    "another coding": post(b"Transfer-Encoding: gzip, chunked\r\n", b"0\r\n\r\n" + SECOND),
    "no known coding": post(b"Transfer-Encoding: identity\r\n", SECOND),
    "nearly chunked": post(b"Transfer-Encoding: xchunked\r\n", SECOND),
    "chunked twice": post(CHUNKED + CHUNKED, b"0\r\n\r\n" + SECOND),
    "chunks in HTTP/1.0": post(CHUNKED, b"0\r\n\r\n" + SECOND).replace(b"HTTP/1.1", b"HTTP/1.0", 1),
    "a folded header": post(b"A: b\r\n c\r\n", SECOND),
    "a bare line feed": post(b"A: b\nContent-Length: 2\r\n", SECOND),
    "a head that ends with bare line feeds": post(b"A: b\n\n", SECOND),
    "a bare carriage return": post(b"A: b\rC: d\r\n", SECOND),
    "a null": post(b"A: \0\r\n", SECOND),
    "no colon": post(b"Content-Length\r\n", SECOND),
    "a proxy's method": b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n" + SECOND,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SECOND,
    "a chunk without its size": post(CHUNKED, b"x\r\nab\r\n0\r\n\r\n" + SECOND),
    "a chunk that is longer than its size": post(CHUNKED, b"1\r\nab\r\n0\r\n\r\n" + SECOND),
    "chunks with bare line feeds": post(CHUNKED, b"2\nab\n0\n\n" + SECOND),
    "two hosts": post(b"Host: y\r\n"),
    "the same host twice": post(b"Host: x\r\n"),
    "no host": b"GET /first HTTP/1.1\r\n\r\n" + SECOND,
    "two hosts in HTTP/1.0": b"GET /first HTTP/1.0\r\nHost: x\r\nHost: y\r\n\r\n" + SECOND,
    "two hosts and an upgrade": post(b"Host: y\r\n" + UPGRADE, SECOND),
    "a port that is none": b"GET http://x:99999/first HTTP/1.1\r\nHost: x\r\n\r\n" + SECOND,
    "an address without a path": b"GET http://x HTTP/1.1\r\nHost: x\r\n\r\n" + SECOND,
    "a long header": post(b"A: " + b"b" * MAX_HEADER_BYTES + b"\r\n", SECOND),
}


async def application(scope, receive, send):
    """Says what it saw, once it has read all of the body. A trailer is none of it."""
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size, more = size + len(message["body"]), message["more_body"]
    assert not any(name == b"authorization" for name, _ in scope["headers"])
    seen = f"{scope['method']} {scope['path']}" + (f" {size}" if scope["method"] == "POST" else "")
    headers = [(b"content-length", b"%d" % len(seen))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": seen.encode()})


async def answers(segments):
    """The statuses of all answers, with the application's own words."""
    transport = Transport()
    config = Config(application, interface="asgi3", log_config=None, ws="none")
    connection = Connection(config, ServerState(), {}, asyncio.get_running_loop(), **settings())
    connection.connection_made(transport)
    for segment in segments:
        if transport.is_closing():
            break
        connection.data_received(segment)
        await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)
    heads = re.findall(
        rb"HTTP/1.1 (\d+) [^\r]*\r\n(?:[^\r]+\r\n)*\r\n([A-Z]+ [^ H]+(?: \d+)?)?", transport.written
    )
    found = [b" ".join(part for part in head if part).decode() for head in heads]
    assert [
        head for head in found if not head.startswith("200")
    ] == [] or b"\r\nx-request-id: " in transport.written
    ended = transport.closed or transport.ended
    connection.connection_lost(None)
    return found + (["closed"] if ended else [])


def split(data, cuts):
    edges = [0, *sorted(cuts), len(data)]
    return [data[start:end] for start, end in zip(edges, edges[1:], strict=False) if start < end]


@pytest.mark.parametrize("name", SERVED)
async def test_a_request_split_at_any_byte_is_answered_as_when_it_comes_at_once(name):
    data, expected = SERVED[name]
    assert await answers([data]) == expected
    for cut in range(1, len(data)):
        assert await answers(split(data, [cut])) == expected, data[:cut]
    assert await answers([data[i : i + 1] for i in range(len(data))]) == expected


@pytest.mark.parametrize("name", REFUSED)
async def test_what_a_proxy_could_understand_in_another_way_is_refused_however_it_is_split(name):
    data = REFUSED[name]
    step = max(1, len(data) // 300)
    for cut in (0, *range(1, len(data), step)):
        found = await answers(split(data, [cut]))
        assert len(found) == 2 and found[0] in ("400", "405", "431"), (found, data[:cut])
        assert found[1] == "closed"


@given(st.sampled_from(sorted(SERVED)), st.sets(st.integers(1, 400), max_size=12))
def test_any_number_of_segments_gives_the_same_answers(name, cuts):
    data, expected = SERVED[name]
    cuts = {cut for cut in cuts if cut < len(data)}
    assert asyncio.run(answers(split(data, cuts))) == expected


async def test_a_refusal_carries_the_request_id_that_its_head_had():
    transport = Transport()
    config = Config(application, interface="asgi3", log_config=None, ws="none")
    connection = Connection(config, ServerState(), {}, asyncio.get_running_loop(), **settings())
    connection.connection_made(transport)
    connection.data_received(REFUSED["length and chunks"])
    assert b"\r\nx-request-id: given\r\n" in transport.written
    connection.connection_lost(None)
