"""The transport between servers on one host: the consumer copies blocks out of the producer's memory.

The producer's KV cache is in a file without a name. A consumer that connects to the producer's unix socket
gets its descriptor, after the same handshake as over TCP, and in place of each block its number in that file,
with the checksum. The socket's name is abstract, so it reaches no further than the network namespace, a pod:
with the end of the processes it is gone, and so is the memory. Reading a file that was cut short is an error,
where a mapping of it would end the process.
"""

from __future__ import annotations

import os
import socket

from quire_server.core.kv_division import Run
from quire_server.core.transfer import TransferError
from quire_server.kv_transfer import frames
from quire_server.kv_transfer.blocks import KVBlocks
from quire_server.kv_transfer.channel import Channel, Pieces, checksum
from quire_server.kv_transfer.frames import Kind, Location


def listen(incarnation: bytes) -> socket.socket:
    """The producer's unix socket."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(_name(incarnation))
    listener.listen()
    return listener


def connect(incarnation: bytes, seconds: float) -> SharedMemoryChannel:
    """A connection to a producer in the same network namespace. Raises OSError where it is elsewhere."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(seconds)
    try:
        connection.connect(_name(incarnation))
    except OSError:
        connection.close()
        raise
    return SharedMemoryChannel(connection)


def _name(incarnation: bytes) -> str:
    return "\0quire-kv-" + incarnation.hex()


class SharedMemoryChannel(Channel):
    """A ``Channel`` over a unix socket; the bytes of blocks do not go through it."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        self._descriptor: int | None = None  # of the producer's memory, at the consumer
        self._runs: tuple[Run, ...] = ()

    def share(self, blocks: KVBlocks, *, deadline: float) -> None:
        """As the producer, let the consumer read the memory of all blocks."""
        assert blocks.descriptor is not None
        body = frames.pack_shared(blocks.runs)
        head = [memoryview(frames.header(Kind.SHARED, len(body)))]  # so little is sent whole or not at all
        read_only = os.open(f"/proc/self/fd/{blocks.descriptor}", os.O_RDONLY)
        try:
            self._call(lambda data: socket.send_fds(self._connection, data, [read_only]), head, deadline)
        finally:
            os.close(read_only)
        self._send_pieces([memoryview(body)], deadline)

    def attach(self, *, deadline: float) -> None:
        """As the consumer, receive that memory. Raises TransferError."""
        size, receive = frames.HEADER.size, socket.recv_fds
        data, descriptors, *_ = self._call(lambda _: receive(self._connection, size, 1), (), deadline)
        if descriptors:
            (self._descriptor,) = descriptors
        if len(data) != size or not descriptors:
            raise TransferError("the producer shares no memory")
        kind, length = frames.parse_header(data)
        if kind is not Kind.SHARED:
            raise TransferError("the peer sent something else than its memory")
        self._runs = frames.parse_shared(self._receive_bytes(length, deadline))

    def send_block(
        self, index: int, block_id: int, pieces: Pieces, *, deadline: float, of: Pieces | None = None
    ) -> None:
        """Say where a block is, with its checksum. ``of``: it is damaged on purpose, by its checksum."""
        location = Location(index, block_id, checksum(pieces))
        self.send(Kind.LOCATION, frames.pack_location(location), deadline=deadline)

    def receive_block(self, index: int, pieces: Pieces, *, deadline: float) -> None:
        """Copy one block to where it belongs; it must be this one, whole and with its checksum."""
        location = frames.parse_location(self.receive(Kind.LOCATION, deadline=deadline)[1])
        assert self._descriptor is not None
        rest = list(reversed(pieces))
        for run in self._runs:
            parts = _take(rest, run.size)
            if os.preadv(self._descriptor, parts, run.at(location.block_id).start) != run.size:
                raise TransferError("the producer's memory has no such block")
        if rest:
            raise TransferError("the producer's blocks have another size")
        self._check(index, location.number, pieces, location.checksum)

    def all_sent(self, *, deadline: float) -> None:
        """Wait until the consumer has copied the last block."""
        self.receive(Kind.DONE, deadline=deadline)

    def all_received(self, *, deadline: float) -> None:
        """Say that the last block is copied."""
        self.send(Kind.DONE, deadline=deadline)

    def close(self) -> None:
        """Close the connection and the memory."""
        super().close()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _take(rest: list[memoryview], size: int) -> list[memoryview]:
    """The next bytes of pieces, the last of which comes first; where there are fewer, all of them."""
    taken: list[memoryview] = []
    while size and rest:
        piece = rest.pop()
        if piece.nbytes > size:
            rest.append(piece[size:])
            piece = piece[:size]
        taken.append(piece)
        size -= piece.nbytes
    return taken
