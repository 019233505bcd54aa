"""Blocks in plain memory, and a producer that serves them without an engine."""

import mmap
import os
import queue
import threading

from quire_server.core.kv_division import Run
from quire_server.core.transfer import prefix_digest
from quire_server.fault_injection import Faults
from quire_server.kv_transfer.holds import SharedHolds
from quire_server.kv_transfer.nixl import Agent
from quire_server.kv_transfer.server import TransferServer

BLOCK_SIZE, PIECES, BLOCK_BYTES = 8, 6, 3000
LAYOUT = b"l" * 32


class FakeBlocks:
    """Each block in several pieces that do not lie one after the other."""

    def __init__(self, num_blocks, seed, is_shared=False, num_pieces=PIECES, block_bytes=BLOCK_BYTES):
        self.block_bytes = block_bytes
        self.num_blocks = num_blocks
        self._size = block_bytes // num_pieces
        stride = num_blocks * self._size
        self.runs = [Run(piece * stride, self._size, self._size) for piece in range(num_pieces)]
        self.descriptor = os.memfd_create("test") if is_shared else None
        content = bytes(
            (seed * 31 + piece * 7 + at * 13) % 251 for piece in range(num_pieces) for at in range(stride)
        )
        memory = memoryview(bytearray(content))
        if self.descriptor is not None:
            os.write(self.descriptor, content)
            memory = memoryview(mmap.mmap(self.descriptor, len(content)))
        self._memory = [memory[piece * stride : (piece + 1) * stride] for piece in range(num_pieces)]

    def pieces(self, block_id):
        first = block_id * self._size
        return [memoryview(memory)[first : first + self._size] for memory in self._memory]

    def replicate(self, block_id):
        pass

    def content(self, block_id):
        return b"".join(self.pieces(block_id))

    def clear(self, block_ids):
        for block_id in block_ids:
            for piece in self.pieces(block_id):
                piece[:] = bytes(self._size)


class FakeProducer:
    """Holds blocks 1, 2, ... for every prefix, at once or when a test lets it."""

    def __init__(
        self,
        tmp_path,
        *,
        keys_dir=None,
        layout=LAYOUT,
        lease=30.0,
        faults=None,
        answers=True,
        address=("127.0.0.1", 0),
        transport="tcp",
    ):
        self.now = 0.0
        self.transport = transport
        self.blocks = FakeBlocks(16, seed=1, is_shared=transport != "tcp")
        self.holds = SharedHolds(lease, clock=lambda: self.now)
        self.jobs = queue.SimpleQueue()
        self.answers = answers
        self.woken = threading.Event()
        self.server = TransferServer(
            address,
            keys_dir=keys_dir,
            layout=layout,
            blocks=self.blocks,
            holds=self.holds,
            submit=self.submit,
            wake=self.woken.set,
            faults=faults or Faults({}, tmp_path),
            agent=Agent(self.holds.incarnation, self.blocks) if transport == "nixl" else None,
        )
        self.address = (address[0], self.server.port)
        self._is_closed = False

    def close(self):
        if not self._is_closed:
            self._is_closed = True
            self.server.close()
            if self.blocks.descriptor is not None:
                os.close(self.blocks.descriptor)

    def submit(self, job):
        self.jobs.put(job)
        if self.answers:
            self.finish(job)

    def finish(self, job):
        prefill = job.prefill
        digest = prefix_digest(prefill.tokens, prefill.salt, BLOCK_SIZE)
        num_blocks = len(prefill.tokens) // BLOCK_SIZE
        job.finish(self.holds.add(digest, range(1, 1 + num_blocks)))
