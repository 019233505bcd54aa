"""One connection between a producer and a consumer: whole frames, blocks in many pieces, deadlines.

A block lies in memory in pieces, keys and values of each layer; it is sent from there and received into there
without a copy in between (scatter/gather). A peer that has not proved to have the key sends and gets nothing
but the handshake. Every wait has a deadline, because a frozen peer and a cut link give no error.
"""

from __future__ import annotations

import socket
import time
import zlib
from collections.abc import Callable, Sequence
from typing import TypeVar

from quire_server.core.transfer import RefusedError, TransferError
from quire_server.kv_transfer import frames
from quire_server.kv_transfer.frames import Kind

_MAX_PIECES = 512  # of one call; the kernel takes 1024

Pieces = Sequence[memoryview]
_Result = TypeVar("_Result")


class Channel:
    """Frames over a connected socket. Methods raise TransferError when the peer is gone, late or wrong."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, kind: Kind, body: bytes = b"", *, deadline: float) -> None:
        """Send one frame by a time of the monotonic clock."""
        self._send_pieces([memoryview(frames.header(kind, len(body)) + body)], deadline)

    def send_block(
        self, index: int, block_id: int, pieces: Pieces, *, deadline: float, of: Pieces | None = None
    ) -> None:
        """Send one block with its checksum, or with that ``of`` other pieces, to damage it on purpose."""
        size = frames.BLOCK_HEAD.size + sum(piece.nbytes for piece in pieces)
        head = frames.header(Kind.BLOCK, size) + frames.BLOCK_HEAD.pack(index, checksum(of or pieces))
        self._send_pieces([memoryview(head), *pieces], deadline)

    def receive(self, *kinds: Kind, deadline: float) -> tuple[Kind, bytes]:
        """The next frame, which must be one of these kinds. The peer's FAILED is raised as a RefusedError."""
        kind, length = self._receive_header(deadline)
        if kind not in kinds:
            raise TransferError(f"the peer sent {kind.name} out of turn")
        return kind, self._receive_bytes(length, deadline)

    def receive_block(self, index: int, pieces: Pieces, *, deadline: float) -> None:
        """Receive one block to where it belongs; it must be this one, whole and with its checksum."""
        kind, length = self._receive_header(deadline)
        if kind is not Kind.BLOCK or length != frames.BLOCK_HEAD.size + sum(p.nbytes for p in pieces):
            raise TransferError("the peer sent something else than a block of this size")
        found, wanted = frames.BLOCK_HEAD.unpack(self._receive_bytes(frames.BLOCK_HEAD.size, deadline))
        self._receive_pieces(pieces, deadline)
        self._check(index, found, pieces, wanted)

    @staticmethod
    def _check(index: int, found: int, pieces: Pieces, wanted: int) -> None:
        if found != index:
            raise TransferError(f"the peer sent block {found} in place of {index}")
        if checksum(pieces) != wanted:
            raise TransferError(f"block {index} has another checksum than at its producer")

    def all_sent(self, *, deadline: float) -> None:
        """The sender of blocks waits until the last one was read from where it is."""

    def all_received(self, *, deadline: float) -> None:
        """The receiver of blocks reads none of them again."""

    def interrupt(self) -> None:
        """Make every call on another thread fail at once."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it is closed already

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _receive_header(self, deadline: float) -> tuple[Kind, int]:
        kind, length = frames.parse_header(self._receive_bytes(frames.HEADER.size, deadline))
        if kind is Kind.FAILED:
            why = self._receive_bytes(length, deadline).decode(errors="replace")
            raise RefusedError(f"the peer refused: {why}")
        return kind, length

    def _receive_bytes(self, length: int, deadline: float) -> bytes:
        data = bytearray(length)
        self._receive_pieces([memoryview(data)], deadline)
        return bytes(data)

    def _receive_pieces(self, pieces: Pieces, deadline: float) -> None:
        self._transfer(list(pieces), deadline, self._receive_some)

    def _send_pieces(self, pieces: Pieces, deadline: float) -> None:
        self._transfer(list(pieces), deadline, self._connection.sendmsg)

    def _receive_some(self, pieces: Pieces) -> int:
        num_bytes = self._connection.recvmsg_into(pieces)[0]
        if not num_bytes:
            raise TransferError("the peer has closed the connection")
        return num_bytes

    def _transfer(self, pieces: list[memoryview], deadline: float, some: Callable[[Pieces], int]) -> None:
        """Call ``some`` until all bytes of all pieces have moved."""
        position = 0
        pieces = [piece for piece in pieces if piece.nbytes]
        while position < len(pieces):
            moved = self._call(some, pieces[position : position + _MAX_PIECES], deadline)
            while position < len(pieces) and moved >= pieces[position].nbytes:
                moved -= pieces[position].nbytes
                position += 1
            if moved:
                pieces[position] = pieces[position][moved:]

    def _call(self, some: Callable[[Pieces], _Result], pieces: Pieces, deadline: float) -> _Result:
        """One call of the socket, by a time of the monotonic clock."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise TransferError("the peer took too long")
        try:
            self._connection.settimeout(left)
            return some(pieces)
        except TimeoutError:
            raise TransferError("the peer took too long") from None
        except OSError as error:
            raise TransferError(f"the connection failed: {error.strerror}") from None


def checksum(pieces: Pieces) -> int:
    """CRC-32 of all pieces, one after the other."""
    value = 0
    for piece in pieces:
        value = zlib.crc32(piece, value)
    return value
