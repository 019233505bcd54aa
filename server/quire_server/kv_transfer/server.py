"""The producer's listener: prefixes to compute go to the engine, held blocks go out to their readers.

A thread a connection, and few of them: each is one transfer. It reads blocks while the engine computes
others, which is safe as long as they are held, and so it asks again after the last byte.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from quire_server.core.transfer import Reference, TransferError, read_seconds
from quire_server.fault_injection import Faults
from quire_server.kv_transfer import frames, handshake, shared_memory
from quire_server.kv_transfer.blocks import KVBlocks
from quire_server.kv_transfer.channel import Channel, Pieces
from quire_server.kv_transfer.frames import Kind, Prefill
from quire_server.kv_transfer.holds import SharedHolds
from quire_server.kv_transfer.nixl import Agent, NixlChannel
from quire_server.kv_transfer.shared_memory import SharedMemoryChannel
from quire_server.peer_auth import Acceptor, UnprovedConnections

logger = logging.getLogger(__name__)

MAX_TRANSFERS = 32
_WAIT_SECONDS = 0.25  # between two signs of life
_SEND_SECONDS = 2.0  # for a small frame


class PrefillJob:
    """A prefix that the engine has to compute and hold. ``is_abandoned``: no consumer waits for it."""

    def __init__(self, prefill: Prefill, holds: SharedHolds, wake: Callable[[], None]) -> None:
        self.prefill = prefill
        self.is_abandoned = False
        self._holds = holds
        self._wake = wake
        self._generation = b""
        self._result: queue.SimpleQueue[Reference | str] = queue.SimpleQueue()

    def finish(self, result: Reference | str) -> None:
        """By the engine: the reference, or why there is none."""
        if isinstance(result, Reference):
            self._generation = result.generation
        self._result.put(result)
        if self.is_abandoned:  # meanwhile: whichever comes second gives the blocks up
            self._holds.cancel(self._generation)

    def wait(self, seconds: float) -> Reference | None:
        """The reference; None if there is none yet. Raises TransferError if there will be none."""
        try:
            result = self._result.get(timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(result, str):
            raise TransferError(result)
        return result

    def abandon(self) -> None:
        """Its consumer is gone, or has read all that it wants."""
        self.is_abandoned = True
        self._holds.cancel(self._generation)
        self._wake()


class TransferServer:
    """Listens for consumers until the process ends. ``submit`` gives a job to the engine's thread."""

    def __init__(
        self,
        address: tuple[str, int],
        *,
        keys_dir: Path | None,
        layout: bytes,
        blocks: KVBlocks,
        holds: SharedHolds,
        submit: Callable[[PrefillJob], None],
        wake: Callable[[], None],
        faults: Faults,
        agent: Agent | None = None,
    ) -> None:
        """With an ``agent`` consumers may read by NIXL. Raises OSError where the address cannot be listened
        on.
        """
        self.load = 0  # requests of this server
        self._keys_dir = keys_dir
        self._layout = layout
        self._blocks = blocks
        self._holds = holds
        self._submit = submit
        self._wake = wake
        self._faults = faults
        self._agent = agent
        self._num_sent = 0
        self._unproved = UnprovedConnections()
        self._free = threading.BoundedSemaphore(MAX_TRANSFERS)
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        listeners = [socket.create_server(address, family=family)]
        self.port: int = listeners[0].getsockname()[1]
        if blocks.descriptor is not None:
            listeners.append(shared_memory.listen(holds.incarnation))
        self._acceptors = [Acceptor(each, self._unproved, self._serve, "kv-transfer") for each in listeners]

    def close(self) -> None:
        """Take no more connections."""
        for acceptor in self._acceptors:
            acceptor.close()

    def _serve(self, connection: socket.socket) -> None:
        channel = self._channel(connection)
        try:
            try:
                self._introduce(channel)
                request = self._request(channel)
            finally:
                self._unproved.remove(connection)
            if not self._free.acquire(blocking=False):
                raise TransferError(f"it has {MAX_TRANSFERS} transfers, and takes no more")
            try:
                self._answer(channel, request)
            finally:
                self._free.release()
        except TransferError as error:
            self._refuse(channel, str(error))
        finally:
            channel.close()

    def _introduce(self, channel: Channel) -> None:
        key = handshake.read_key(self._keys_dir)
        handshake.accept(channel, key, self._layout, self._holds.incarnation, self.load)
        if isinstance(channel, SharedMemoryChannel):
            channel.share(self._blocks, deadline=time.monotonic() + _SEND_SECONDS)

    def _request(self, channel: Channel) -> tuple[Kind, bytes]:
        """The next one of a consumer, which may have to wait for room until it reads."""
        while True:
            deadline = time.monotonic() + self._holds.lease_seconds
            request = channel.receive(Kind.PREFILL, Kind.READ, Kind.ATTACH, deadline=deadline)
            if request[0] is not Kind.ATTACH:
                return request
            self._share(channel)

    def _answer(self, channel: Channel, request: tuple[Kind, bytes]) -> None:
        """Do what a consumer asks for, until it goes."""
        jobs = list[PrefillJob]()
        try:
            while True:
                kind, body = request
                if kind is Kind.PREFILL:
                    jobs.append(PrefillJob(frames.parse_prefill(body), self._holds, self._wake))
                    self._prefill(channel, jobs[-1])
                else:
                    self._send_blocks(channel, *frames.parse_read(body))
                request = self._request(channel)
        finally:
            for job in jobs:
                job.abandon()

    def _channel(self, connection: socket.socket) -> Channel:
        if connection.family == socket.AF_UNIX:
            return SharedMemoryChannel(connection)
        return Channel(connection) if self._agent is None else NixlChannel(connection, self._agent)

    @staticmethod
    def _share(channel: Channel) -> None:
        """Let a consumer read by NIXL, if this server has it."""
        if not isinstance(channel, NixlChannel):
            raise TransferError("this producer does not offer NIXL: give it --kv-transport nixl, too")
        channel.share(deadline=time.monotonic() + _SEND_SECONDS)

    def _prefill(self, channel: Channel, job: PrefillJob) -> None:
        """Let the engine compute a prefix, and send the consumer its reference."""
        self._submit(job)
        while (reference := job.wait(_WAIT_SECONDS)) is None:
            channel.send(Kind.WAIT, deadline=time.monotonic() + _SEND_SECONDS)
        body = frames.pack_reference(reference)
        channel.send(Kind.HELD, body, deadline=time.monotonic() + _SEND_SECONDS)

    def _send_blocks(self, channel: Channel, reference: Reference, first: int) -> None:
        block_ids = self._holds.readable(reference, first)
        deadline = time.monotonic() + read_seconds(len(block_ids) * self._blocks.block_bytes)
        for index, block_id in enumerate(block_ids, start=first):
            pieces = self._blocks.pieces(block_id)
            self._num_sent += 1
            if self._faults.due("corrupt_kv_transfer", self._num_sent):
                channel.send_block(index, block_id, _damaged(pieces), deadline=deadline, of=pieces)
            else:
                channel.send_block(index, block_id, pieces, deadline=deadline)
        channel.all_sent(deadline=deadline)
        self._holds.confirm(reference)
        channel.send(Kind.CONFIRMED, deadline=deadline)

    @staticmethod
    def _refuse(channel: Channel, why: str) -> None:
        """Send the reason to the peer, if it is still there."""
        try:
            deadline = time.monotonic() + _SEND_SECONDS
            channel.send(Kind.FAILED, why[: frames.MAX_FAILURE].encode(), deadline=deadline)
        except TransferError:
            logger.debug("a consumer of KV blocks is gone", extra={"why": why})


def _damaged(pieces: Pieces) -> list[memoryview]:
    """The same bytes but for one bit."""
    last = bytearray(pieces[-1])
    last[-1] ^= 1
    return [*pieces[:-1], memoryview(last)]
