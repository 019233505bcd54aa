"""The consumer's end of a transfer: choose a producer, have a prefix computed there, read its blocks."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from quire_server.core.transfer import Reference, TransferError, read_seconds
from quire_server.kv_transfer import frames, handshake, shared_memory
from quire_server.kv_transfer.blocks import KVBlocks
from quire_server.kv_transfer.channel import Channel
from quire_server.kv_transfer.frames import Kind, Prefill
from quire_server.kv_transfer.handshake import Producer
from quire_server.kv_transfer.nixl import Agent, NixlChannel

logger = logging.getLogger(__name__)

_CONNECT_SECONDS = 0.5
_RETRY_SECONDS = 5.0  # a producer that failed is left alone for so long
_SILENCE_SECONDS = 1.5  # a producer that computes gives signs of life more often than this
_SEND_SECONDS = 2.0

Address = tuple[str, int]


class Producers:
    """The producers of one consumer. Names are resolved for each connection: replicas come and go."""

    def __init__(
        self,
        addresses: Sequence[Address],
        keys_dir: Path | None,
        layout: bytes,
        transport: str = "auto",
        agent: Agent | None = None,
    ) -> None:
        """``transport``: ``tcp``, ``shared_memory``, ``nixl`` with an ``agent``, or ``auto``: the second one
        where it is possible.
        """
        self._addresses = addresses
        self._keys_dir = keys_dir
        self._layout = layout
        self._transport = transport
        self._agent = agent
        self._avoided: dict[Address, float] = {}  # until when

    def connect(self) -> tuple[Channel, Address]:
        """A connection to the producer with the fewest requests. Raises TransferError."""
        key, why = handshake.read_key(self._keys_dir), "every producer has just failed"
        best: tuple[Channel, Address, Producer] | None = None
        for address in self._resolved():
            if self._avoided.get(address, 0.0) > time.monotonic():
                continue
            try:
                channel, producer = self._introduce(address, key)
            except TransferError as error:
                why = f"{address[0]} port {address[1]}: {error}"
                self.failed(address, str(error))
                continue
            closed: Channel | None = channel
            if best is None or producer.load < best[2].load:
                closed, best = best[0] if best else None, (channel, address, producer)
            if closed is not None:
                closed.close()
        if best is None:
            raise TransferError(why)
        channel, address, producer = best
        return self._shared(channel, producer.incarnation, key), address

    def failed(self, address: Address, why: str) -> None:
        """Leave a producer alone for a while."""
        logger.warning("a kv_producer failed", extra={"address": f"{address[0]}:{address[1]}", "why": why})
        now = time.monotonic()
        still = {other: until for other, until in self._avoided.items() if until > now}
        self._avoided = {**still, address: now + _RETRY_SECONDS}

    def _resolved(self) -> list[Address]:
        """The addresses of all names that are known."""
        found: list[Address] = []
        for address in self._addresses:
            try:
                entries = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
            except OSError as error:
                logger.warning("no producer has this name", extra={"host": address[0], "why": str(error)})
                continue
            found += [(str(entry[4][0]), int(entry[4][1])) for entry in entries]
        return found

    def _shared(self, channel: Channel, incarnation: bytes, key: bytes) -> Channel:
        """A connection to the same producer over which blocks are read from its memory, if there is one."""
        if self._transport in ("tcp", "nixl"):
            return channel
        try:
            local = self._attached(incarnation, key)
        except (OSError, TransferError) as error:
            if self._transport == "auto":
                return channel
            channel.close()
            raise TransferError(f"the producer shares no memory with this server: {error}") from None
        channel.close()
        return local

    def _attached(self, incarnation: bytes, key: bytes) -> Channel:
        channel = shared_memory.connect(incarnation, _CONNECT_SECONDS)
        try:
            handshake.introduce(channel, key, self._layout)
            channel.attach(deadline=time.monotonic() + _SEND_SECONDS)
        except TransferError:
            channel.close()
            raise
        return channel

    def _introduce(self, address: Address, key: bytes) -> tuple[Channel, Producer]:
        try:
            connection = socket.create_connection(address, _CONNECT_SECONDS)
        except OSError as error:
            raise TransferError(f"no connection: {error.strerror or 'it took too long'}") from None
        channel = Channel(connection) if self._agent is None else NixlChannel(connection, self._agent)
        try:
            producer = handshake.introduce(channel, key, self._layout)
            if isinstance(channel, NixlChannel):
                channel.attach(deadline=time.monotonic() + _SEND_SECONDS)
        except TransferError:
            channel.close()
            raise
        return channel, producer


def prefill(channel: Channel, wanted: Prefill, prefix: bytes, seconds: float) -> Reference:
    """Have a prefix computed within a time; ``prefix`` is its digest. Raises TransferError."""
    end = time.monotonic() + seconds
    channel.send(Kind.PREFILL, frames.pack_prefill(wanted), deadline=time.monotonic() + _SEND_SECONDS)
    while True:
        deadline = min(end, time.monotonic() + _SILENCE_SECONDS)
        kind, body = channel.receive(Kind.WAIT, Kind.HELD, deadline=deadline)
        if kind is Kind.HELD:
            break
    reference = frames.parse_reference(body)
    if reference.prefix != prefix:
        raise TransferError("the producer holds another prefix than was asked for")
    return reference


def read(
    channel: Channel, reference: Reference, first: int, blocks: KVBlocks, block_ids: Sequence[int]
) -> None:
    """Read held blocks from an index on to these blocks. They are right when this returns, and of no use when
    it raises TransferError.
    """
    if first + len(block_ids) != reference.num_blocks:
        raise TransferError(f"the producer holds {reference.num_blocks} blocks")
    deadline = time.monotonic() + read_seconds(len(block_ids) * blocks.block_bytes)
    channel.send(Kind.READ, frames.pack_read(reference, first), deadline=deadline)
    for index, block_id in enumerate(block_ids, start=first):
        channel.receive_block(index, blocks.pieces(block_id), deadline=deadline)
        blocks.replicate(block_id)
    channel.all_received(deadline=deadline)
    channel.receive(Kind.CONFIRMED, deadline=deadline)
