"""Authentication, limits of a request's size, and invalid requests, by raw sockets against the real
server.
"""

import contextlib
import http.client
import json
import os
import socket
import time
from pathlib import Path

import httpx
import pytest

from quire_http.exchange import MAX_BODY_BYTES
from tests.server import listening
from tests.server.conftest import KEY

ASK = {"model": "tiny", "prompt": "Once", "max_tokens": 2}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/models", "/tokenize", "/version", "/nowhere", "/health?deep=true"]
)
def test_without_a_key_everything_but_health_and_metrics_is_denied(server, path):
    for headers in ({}, {"authorization": "Bearer wrong"}):
        response = httpx.get(server.url + path, headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"


def test_a_wrong_method_is_a_405_with_an_allow_header(server):
    key = {"authorization": f"Bearer {KEY}"}
    for method, path, allowed in (
        ("PUT", "/v1/models", "GET, HEAD"),
        ("GET", "/v1/completions", "POST"),
        ("PUT", "/v1/responses/x", "GET, HEAD, DELETE"),
    ):
        response = httpx.request(method, server.url + path, headers=key)
        assert (response.status_code, response.headers["allow"]) == (405, allowed)


@pytest.mark.parametrize("host", ["x?", "x/", "x#", "x/../health", "@", "\\", "/health", "a" * 8192])
def test_no_host_header_bypasses_authentication(server, host):
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert connection.recv(64).split(b" ")[1] in (b"401", b"400")


def test_invalid_data_on_the_engine_s_socket_does_not_affect_requests(server):
    path = server.run_dir() / "engine.sock"
    for _ in range(20):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(path))
            stranger.sendall(os.urandom(512))
    assert server.post("/v1/completions", ASK, key=KEY).status_code == 200


def test_the_server_listens_only_on_the_configured_addresses(server):
    found = {address for family, address in listening.addresses(server) if family == socket.AF_INET}
    assert found == {("127.0.0.1", server.port), ("127.0.0.1", server.health_port)}


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /health HTTP/1.1\r\nHost: x\r\nBig: " + b"a" * 200_000 + b"\r\n\r\n", 431),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + KEY.encode() + b"\r\n"
         b"Content-Length: 5000000\r\n\r\n" + b"x" * 4_400_000, 413),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    ],
    ids=["headers", "body", "TLS"],
)  # fmt: skip
def test_oversized_or_malformed_http_is_refused(server, sent, status):
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(sent)
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert response.status == status
        assert json.loads(response.read())["error"]["message"]


def test_an_error_response_reaches_a_client_that_sends_its_whole_body_first(server):
    """As behind a proxy that speaks HTTP/1.0. A connection closed with bytes unread would be reset."""
    length = 16 << 20
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        % length
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
        connection.sendall(head + b" " * length)
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert response.status == 401
        assert json.loads(response.read())["error"]["message"]
        assert connection.recv(1) == b"", "the server closes in order"


def test_a_body_that_is_a_byte_too_long_does_not_hold_up_the_connections_next_request(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    with contextlib.closing(connection):
        for body, status in ((b" " * (MAX_BODY_BYTES + 1), 413), (json.dumps(ASK).encode(), 200)):
            connection.request(
                "POST", "/v1/completions", body, {"Authorization": f"Bearer {KEY}", "Host": "x"}
            )
            response = connection.getresponse()
            response.read()
            assert response.status == status


@pytest.mark.parametrize(
    "flood", [b"0\r\n" + b"X: " + b"a" * 64_000, b"1;" + b"e" * 64_000], ids=["trailers", "extensions"]
)
def test_chunk_extensions_and_trailers_are_bounded(server, flood):
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + KEY.encode() + b"\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(head + flood)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(64):
                connection.sendall(b"a" * 64_000)
            assert connection.recv(1) == b"", "the server has hung up"


@pytest.mark.parametrize("packets", [1, 2])
def test_an_h2c_upgrade_offer_is_answered_in_http_1_1(server, packets):
    """As java.net.http does by default."""
    body = json.dumps(ASK).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nHost: x\r\n"
        b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nUpgrade: h2c\r\n"
        b"Authorization: Bearer " + KEY.encode() + b"\r\nContent-Length: %d\r\n\r\n" % len(body)
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        if packets == 2:
            connection.sendall(head)
            time.sleep(0.1)
            connection.sendall(body)
        else:
            connection.sendall(head + body)
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert (response.status, response.read()[:1]) == (200, b"{")
        assert response.headers["connection"] == "close"


def test_a_body_in_chunks_of_one_byte_is_accepted(server):
    body = json.dumps(ASK).encode() + b" " * 100_000
    chunks = (body[index : index + 1] for index in range(len(body)))
    response = httpx.post(
        server.url + "/v1/completions",
        content=chunks,
        headers={"authorization": f"Bearer {KEY}", "content-type": "application/json"},
        timeout=60,
    )
    assert response.status_code == 200


def test_an_idle_server_uses_at_most_six_percent_of_a_core(server):
    def cpu_seconds():
        ticks = 0
        for pid in [server.process.pid, *server.children().values()]:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    server.wait("it is idle", lambda: server.statusz()["running"] == 0)
    before = cpu_seconds()
    time.sleep(2)
    assert cpu_seconds() - before <= 0.12, "more than 6 % of a core while idle"
