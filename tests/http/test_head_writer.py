"""The head of a response leaves with the first bytes of its body, and never later than the next turn."""

import asyncio

from quire_http.head_writer import HeadWriter

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closed
        self.writes.append(bytes(data))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def made() -> tuple[Transport, HeadWriter]:
    transport = Transport()
    return transport, HeadWriter(transport, asyncio.get_running_loop())


async def test_a_head_and_a_body_that_follows_at_once_are_one_write() -> None:
    transport, writer = made()
    writer.write(HEAD)
    writer.write(b"one")
    writer.write(b"two")
    await asyncio.sleep(0)  # the next turn
    assert transport.writes == [HEAD + b"one", b"two"]


async def test_a_head_does_not_wait_for_a_body_that_comes_later() -> None:
    transport, writer = made()
    writer.write(HEAD)
    await asyncio.sleep(0)  # the next turn
    assert transport.writes == [HEAD]
    writer.write(b"one")
    assert transport.writes == [HEAD, b"one"]


async def test_a_body_that_looks_like_a_head_is_sent_as_it_is() -> None:
    transport, writer = made()
    writer.write(HEAD)
    writer.write(HEAD)
    writer.write(HEAD)
    await asyncio.sleep(0)  # the next turn
    assert b"".join(transport.writes) == 3 * HEAD


async def test_a_head_is_sent_before_its_connection_is_closed_and_not_after() -> None:
    transport, writer = made()
    writer.write(HEAD)
    writer.close()
    assert (transport.writes, transport.closed) == ([HEAD], True)

    transport, writer = made()
    writer.write(HEAD)
    transport.close()  # by the other side
    await asyncio.sleep(0)  # the next turn
    assert transport.writes == [] and writer.is_closing()
