"""The transport by NIXL: the consumer reads blocks out of the producer's memory by what UCX finds between the
two: RDMA, TCP, or memory of one host.

Frames go over TCP after the same handshake as ever. In place of each block the producer sends at which
addresses its pieces are, with the checksum. The library has no authentication: who reaches its ports can read
and write the memory of these processes, and only the network keeps strangers from them. It is a package of
its own, imported where this transport is chosen.

A read cannot be ended: its bytes were seen to arrive after its handle was released, and after its peer was
removed. So they arrive in memory that is used for nothing else as long as the read may go on, and are copied
to the block afterwards. The library has no thread here, which would take a third of a core while there is
nothing to do: both sides drive it while they wait.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import mmap
import os
import select
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from quire_server.config import NIXL_PACKAGE
from quire_server.core.transfer import TransferError
from quire_server.kv_transfer import frames
from quire_server.kv_transfer.blocks import KVBlocks
from quire_server.kv_transfer.channel import Channel, Pieces, checksum
from quire_server.kv_transfer.frames import Kind, Place, Places

_POLL_SECONDS = 0.0001
_DRAM = "DRAM"
_GOES_ON, _DONE, _FAILED = "PROC", "DONE", "ERR"  # as the library says

logger = logging.getLogger(__name__)


class _Staging:
    """Memory that blocks are read into."""

    def __init__(self, size: int) -> None:
        self.memory = memoryview(mmap.mmap(-1, size))
        self.address = _address(self.memory)


class Agent:
    """NIXL in this process, under a name that no other process has; of a producer with the memory of its
    blocks. Its calls are made one at a time.
    """

    def __init__(self, name: bytes, blocks: KVBlocks | None = None) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        library = importlib.import_module(NIXL_PACKAGE)
        config = library.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent = library.nixl_agent(name.hex(), config)
        self._lock = threading.Lock()
        self._staged: list[_Staging] = []  # all of it: no memory that the library has is ever freed
        self._free: list[_Staging] = []
        self._unfinished: list[tuple[Any, _Staging]] = []  # reads that were given up, and where they write
        self._peers: dict[bytes, str] = {}  # names by metadata
        if blocks is not None:
            assert blocks.descriptor is not None
            first = min(_address(piece) for piece in blocks.pieces(0))  # the file is mapped in one piece
            self._register(first, os.fstat(blocks.descriptor).st_size)
        self.metadata: bytes = self._agent.get_agent_metadata()

    def add_peer(self, metadata: bytes) -> str:
        """The name of the agent whose metadata this is. Raises TransferError."""
        with self._lock:
            if metadata not in self._peers:
                name = self._call(self._agent.add_remote_agent, metadata)
                if name == _FAILED:
                    raise TransferError("NIXL cannot use what the producer sent")
                self._peers[metadata] = name.decode()
            return self._peers[metadata]

    def drive(self) -> None:
        """Answer what other agents ask."""
        with self._lock:
            self._agent.get_new_notifs()

    def read(self, peer: str, places: Sequence[Place], deadline: float) -> _Staging:
        """What the peer has at these places, one after the other; to be given back. Raises TransferError."""
        with self._lock:
            staging = self._staging(sum(place.size for place in places))
            handle, state = self._begin(peer, places, staging)
        while state == _GOES_ON:
            if time.monotonic() > deadline:
                with self._lock:
                    self._unfinished.append((handle, staging))
                raise TransferError("the peer took too long")
            time.sleep(_POLL_SECONDS)  # the library has nothing to wait on
            with self._lock:
                state = self._call(self._agent.check_xfer_state, handle)
        if state == _DONE:
            return staging
        with self._lock:
            self._forget(peer)
        raise TransferError("NIXL could not read from the peer")

    def give_back(self, staging: _Staging) -> None:
        """It is read again by other transfers."""
        with self._lock:
            self._free.append(staging)

    # ---------------------------------------------------------------- under the lock

    def _begin(self, peer: str, places: Sequence[Place], staging: _Staging) -> tuple[Any, str]:
        here, address = list[tuple[int, int, int]](), staging.address
        for place in places:
            here.append((address, place.size, 0))
            address += place.size
        there = [(place.address, place.size, 0) for place in places]
        near, far = (self._agent.get_xfer_descs(each, _DRAM) for each in (here, there))
        handle = self._call(self._agent.initialize_xfer, "READ", near, far, peer)
        return handle, handle if handle == _FAILED else self._call(self._agent.transfer, handle)

    def _forget(self, peer: str) -> None:
        """The next connection to it is a new one."""
        known = {metadata: name for metadata, name in self._peers.items() if name != peer}
        if known != self._peers:
            self._peers = known
            self._call(self._agent.remove_remote_agent, peer)

    def _staging(self, size: int) -> _Staging:
        """Memory of at least a size that no read writes to."""
        for handle, staging in self._unfinished:
            if self._call(self._agent.check_xfer_state, handle) == _DONE:
                self._free.append(staging)
        self._unfinished = [one for one in self._unfinished if one[1] not in self._free]
        for number, staging in enumerate(self._free):
            if staging.memory.nbytes >= size:
                return self._free.pop(number)
        made = _Staging(size)
        self._staged.append(made)
        self._register(made.address, size)
        return made

    def _register(self, address: int, size: int) -> None:
        self._agent.register_memory([(address, size, 0, "")], _DRAM)

    @staticmethod
    def _call(function: Any, *arguments: Any) -> Any:
        """What the library returns, or where it raises what it also returns for a transfer that failed."""
        try:
            return function(*arguments)
        except Exception as error:  # its errors have no class of their own
            logger.info("NIXL failed", extra={"why": str(error)})
            return _FAILED


class NixlChannel(Channel):
    """A ``Channel`` over TCP. The bytes of blocks do not go through it once both sides agree on that."""

    def __init__(self, connection: socket.socket, agent: Agent) -> None:
        super().__init__(connection)
        self._agent = agent
        self._is_shared = False  # at the producer: the consumer reads by NIXL
        self._peer = ""  # at the consumer: the producer's agent

    def share(self, *, deadline: float) -> None:
        """As the producer, let the consumer read the memory of all blocks."""
        self.send(Kind.AGENT, frames.pack_agent(self._agent.metadata), deadline=deadline)
        self._is_shared = True

    def attach(self, *, deadline: float) -> None:
        """As the consumer, ask for that. Raises TransferError."""
        self.send(Kind.ATTACH, deadline=deadline)
        body = self.receive(Kind.AGENT, deadline=deadline)[1]
        self._peer = self._agent.add_peer(frames.parse_agent(body))

    def send_block(
        self, index: int, block_id: int, pieces: Pieces, *, deadline: float, of: Pieces | None = None
    ) -> None:
        """Say where a block is, with its checksum. ``of``: it is damaged on purpose, by its checksum."""
        if not self._is_shared:
            super().send_block(index, block_id, pieces, deadline=deadline, of=of)
            return
        places = tuple(Place(_address(piece), piece.nbytes) for piece in of or pieces)
        body = frames.pack_places(Places(index, checksum(pieces), places))
        self._drive_until(select.POLLOUT, deadline)
        self.send(Kind.PLACES, body, deadline=deadline)

    def receive_block(self, index: int, pieces: Pieces, *, deadline: float) -> None:
        """Read one block to where it belongs; it must be this one, whole and with its checksum."""
        block = frames.parse_places(self.receive(Kind.PLACES, deadline=deadline)[1])
        if sum(place.size for place in block.places) != sum(piece.nbytes for piece in pieces):
            raise TransferError("the peer has a block of another size")
        staging, position = self._agent.read(self._peer, block.places, deadline), 0
        for piece in pieces:
            piece[:] = staging.memory[position : position + piece.nbytes]
            position += piece.nbytes
        self._agent.give_back(staging)
        self._check(index, block.number, pieces, block.checksum)

    def all_sent(self, *, deadline: float) -> None:
        """Wait until the consumer has read the last block."""
        if self._is_shared:
            self._drive_until(select.POLLIN, deadline)
            self.receive(Kind.DONE, deadline=deadline)

    def all_received(self, *, deadline: float) -> None:
        """Say that the last block is read."""
        self.send(Kind.DONE, deadline=deadline)

    def _drive_until(self, event: int, deadline: float) -> None:
        """Answer the consumer's reads until a frame can be sent or received, or until the deadline."""
        poll = select.poll()
        poll.register(self._connection, event)
        while not poll.poll(0) and time.monotonic() < deadline:
            self._agent.drive()
            time.sleep(_POLL_SECONDS)  # the library has nothing to wait on


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
