"""One attempt, against servers that answer with what is no HTTP."""

import asyncio

import pytest

from quire_gateway.attempt import Attempt, AttemptError, ReplicaUpstream, UpstreamRequest
from quire_gateway.relay_failures import code_of
from quire_gateway.replicas import ReplicaTable
from quire_gateway.request_signing import TOKEN_HEADER
from quire_gateway.routing.by_load import RoundRobin
from quire_gateway.settings import Timeouts
from tests.gateway.kube_stub import NAMESPACE, endpoint_slice

BAD_HEADS = {
    "header too long": b"HTTP/1.1 200 OK\r\nx-long: " + b"a" * 9000 + b"\r\n\r\n",
    "no HTTP": b"ABC no HTTP at all\r\n\r\n",
}
NO_STATUSES = [b"HTTP/1.1 %b A\r\ncontent-length: 0\r\n\r\n" % one for one in (b"000", b"999")]
NO_STATUSES += [b"HTTP/1.1 101 A\r\nupgrade: a\r\nconnection: upgrade\r\n\r\n"]
CUT = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"


class Signer:
    """Signs with what must be in no message."""

    def token(self, *facts):
        return "the-token"


def failure_of(answer):
    """The error of one request to a server with this answer, and what the server was sent."""
    received = []

    async def serve(reader, writer):
        received.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        await writer.drain()
        writer.close()

    async def run():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        table = ReplicaTable((NAMESPACE,), 0, lambda: 0.0, lambda _: RoundRobin())
        table.put(endpoint_slice("s", {"a": "127.0.0.1"}, port=port))
        model = table.at((NAMESPACE, "tiny"))
        upstream = ReplicaUpstream(Signer())
        request = UpstreamRequest("/v1/completions", {"x-secret": "the-secret"}, b"{}", False)
        try:
            with (
                pytest.raises(AttemptError) as failed,
                Attempt(upstream, model, model.replicas["a"], Timeouts()) as attempt,
            ):
                await attempt.ask(request)
                await attempt.read_whole()
        finally:
            await upstream.close()
            server.close()
        return failed.value

    failure = asyncio.run(run())
    assert TOKEN_HEADER.encode() in received[0] and b"the-token" in received[0]
    return failure


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        *((head, "reset") for head in BAD_HEADS.values()),
        *((head, "no_answer") for head in NO_STATUSES),
        (CUT, "cut"),
    ],
)
def test_the_message_of_a_failure_has_no_header_of_the_request(answer, reason):
    failure = failure_of(answer)
    assert failure.reason == reason
    assert not [one for one in ("the-token", "the-secret", TOKEN_HEADER) if one in str(failure)]


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}", b'{"error": "no room"}'])
def test_a_refusal_that_is_no_error_of_ours_has_no_code(body):
    assert code_of(body) == ""
