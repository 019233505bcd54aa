"""Very many streams at a time, of one client, with the default settings."""

import asyncio
import json

import pytest

from e2e.ports import free_ports
from tests.gateway.kube_stub import endpoint_slice

NUM_STREAMS = 1500
BODY = json.dumps(
    {"model": "tiny", "messages": [{"role": "user", "content": "word " * 200}], "stream": True}
).encode()
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n" % len(BODY)
) + BODY
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"id":"1","created":1,"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


class Replica:
    """Begins each stream at once, and ends all of them when it is asked to."""

    def __init__(self):
        self.end = asyncio.Event()
        self.num_begun = 0

    async def serve(self, reader, writer):
        """One connection."""
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))
        writer.write(HEAD + chunk(EVENT))
        self.num_begun += 1
        await self.end.wait()
        writer.write(chunk(DONE) + b"0\r\n\r\n")
        await writer.drain()
        writer.close()


async def one_stream(port, is_open):
    """The bytes of an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(REQUEST)
    answer = await reader.readuntil(b"\r\n\r\n")
    if answer.startswith(b"HTTP/1.1 200 "):
        answer += await reader.readuntil(EVENT)
        is_open.release()
        answer += await reader.readuntil(b"0\r\n\r\n")
    else:
        is_open.release()
    writer.close()
    return answer


async def open_streams(gateway_port, replica_port, number):
    """All answers, which are open at the same time."""
    replica, is_open = Replica(), asyncio.Semaphore(0)
    async with await asyncio.start_server(replica.serve, "127.0.0.1", replica_port, backlog=4096):
        streams = [asyncio.ensure_future(one_stream(gateway_port, is_open)) for _ in range(number)]
        for _ in range(number):
            await is_open.acquire()
        assert replica.num_begun == number, "all are open at once"
        replica.end.set()
        return await asyncio.gather(*streams)


@pytest.mark.deep
@pytest.mark.timeout(180)
def test_one_client_may_have_very_many_streams_open(start):
    (port,) = free_ports(1)
    gateway = start(endpoint_slice("tiny-1", {"one": "127.0.0.1"}, port=port))

    answers = asyncio.run(open_streams(gateway.port, port, NUM_STREAMS))

    assert {answer.split(b"\r\n")[0] for answer in answers} == {b"HTTP/1.1 200 OK"}
    assert all(EVENT in answer and DONE in answer for answer in answers)
