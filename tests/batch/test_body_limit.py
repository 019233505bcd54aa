"""Bodies of JSON are limited before they are parsed, and read only where a gateway has signed for them."""

import socket

import pytest

from quire_batch.lines import MAX_LINE_BYTES
from tests.batch.launch import Signed, http_client


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/v1/batches", b"x" * ((1 << 20) + 1)),
        ("/v1/jobs", b"x" * (MAX_LINE_BYTES + 1)),
        ("/v1/jobs", b"[" + b"0," * (1 << 19) + b"0]"),
    ],
)
def test_a_body_that_is_too_long_is_refused_whether_announced_or_not(start, signer, path, content):
    http = http_client(auth=Signed(signer, "models/alice"), base_url=start().url)
    for body in (content, iter([content[:1000], content[1000:]])):
        answer = http.post(path, content=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_long")


def test_nothing_is_read_of_a_body_that_no_gateway_has_signed_for(start):
    batch = start()
    head = (
        b"POST /v1/jobs HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", batch.port), timeout=60) as connection:
        connection.sendall(head)  # and nothing of the body
        assert b" 401 " in connection.recv(4096).splitlines()[0]
