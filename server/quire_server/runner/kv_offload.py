"""Executes a Step's copies of KV blocks between the GPU or CPU cache, the host tier and the disk tier.

Every block gets a checksum when it leaves the cache and is verified on its way back; a block with another
checksum is not loaded. The scheduler decides which slot holds which block (``core.kv_offload``).
"""

import logging
import os
import queue
import tempfile
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire_server.core.step import Copies, CopyOutcome, Step
from quire_server.layers.ops import host_pool, load_blocks, save_blocks
from quire_server.runner.gpu.block_copies import BlockCopies
from quire_server.runner.gpu.device import BesideCopy, Device

logger = logging.getLogger(__name__)

_MAX_WAITING_BYTES = 64 << 20  # of queued writes; further blocks are dropped
_READ_SECONDS = 5.0  # a slower disk is turned off
_ROW_BYTES = 4096
_IDLE_WAIT_SECONDS = 0.02  # for the disk, in a step that computes nothing


def checksum(block: bytes | memoryview) -> int:
    """A 32-bit checksum of a block: CRC-32 of the row and column sums of its 64-bit words.

    A flipped bit changes one sum of each, lost or exchanged pages change row sums. A CRC of all bytes takes
    four times as long and would be most of the cost of a copy.
    """
    whole = len(block) - len(block) % _ROW_BYTES
    words = np.frombuffer(block, np.uint64, whole // 8).reshape(-1, _ROW_BYTES // 8)
    sums = zlib.crc32(words.sum(0).tobytes(), zlib.crc32(words.sum(1).tobytes()))
    return zlib.crc32(block[whole:], sums)


class DiskRead(NamedTuple):
    """A finished read: the bytes and their checksum, or None."""

    tag: int
    data: bytes | None
    checksum: int = 0


class _Job(NamedTuple):
    slot: int
    data: bytes | None  # to write; None reads
    tag: int
    checksum: int


class DiskTier:
    """The tier below host memory: one unnamed file of block-sized slots, read and written by one thread.

    ``write`` and ``read`` queue, ``collect`` returns results; all are called by the engine's thread and none
    of them blocks on the disk. The file has no name, so the kernel frees its space however the process ends,
    and no process can read what another one left. Requests run in the order of the calls. After any disk
    error, or a read that takes too long, the tier is off until the next start: one line in the log, and
    pending reads fail.
    """

    def __init__(self, directory: Path, num_slots: int, slot_bytes: int) -> None:
        """Raises OSError if the directory cannot be written to."""
        self.num_slots = num_slots
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115  (open as long as the process)
        self._slot_bytes = slot_bytes
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[DiskRead] = queue.SimpleQueue()
        self._max_waiting = max(4, _MAX_WAITING_BYTES // slot_bytes)
        self._reads: deque[tuple[int, float]] = deque()  # (tag, time of the call)
        self._error: OSError | None = None
        self._is_off = False
        self._thread = threading.Thread(target=self._run, name="kv-disk", daemon=True)
        self._thread.start()

    @property
    def is_off(self) -> bool:
        """Whether the tier was turned off after an error."""
        return self._is_off

    def write(self, slot: int, data: bytes) -> bool:
        """Queue a block for a slot; False if too many writes are pending or the tier is off."""
        if self._is_off or self._jobs.qsize() >= self._max_waiting:
            return False
        self._jobs.put(_Job(slot, data, -1, 0))
        return True

    def read(self, slot: int, tag: int, checksum: int) -> None:
        """Queue a read; its result carries the tag. Bytes with another checksum count as a failed read."""
        self._reads.append((tag, time.monotonic()))
        self._jobs.put(_Job(slot, None, tag, checksum))

    def collect(self, timeout: float) -> list[DiskRead]:
        """Finished reads. If any read is pending, wait up to ``timeout`` seconds for the first one."""
        arrivals: list[DiskRead] = []
        while self._reads and not self._is_off:
            try:
                arrival = self._done.get(timeout=0.0 if arrivals else timeout)
            except queue.Empty:
                break
            self._reads.popleft()
            arrivals.append(arrival)
        if not self._is_off:
            late = bool(self._reads) and time.monotonic() - self._reads[0][1] > _READ_SECONDS
            if self._error is not None or late:
                self._give_up(self._error or TimeoutError(f"a read took more than {_READ_SECONDS:g} seconds"))
        if self._is_off:
            arrivals += [DiskRead(tag, None) for tag, _ in self._reads]
            self._reads.clear()
        return arrivals

    def close(self) -> None:
        """End the thread and free the space."""
        self._jobs.put(None)
        self._thread.join()
        self._file.close()

    def _give_up(self, error: OSError) -> None:
        self._is_off = True
        logger.error("the KV disk tier is off until the next start", extra={"why": str(error)})

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._do(job)
            except OSError as error:
                self._error = error
                if job.data is None:
                    self._done.put(DiskRead(job.tag, None))

    def _do(self, job: _Job) -> None:
        offset = job.slot * self._slot_bytes
        if job.data is not None:
            if self._error is None and os.pwrite(self._file.fileno(), job.data, offset) < len(job.data):
                raise OSError("a block was written in part only: the disk is full")
            return
        data = os.pread(self._file.fileno(), self._slot_bytes, offset)
        is_whole = self._error is None and len(data) == self._slot_bytes and checksum(data) == job.checksum
        self._done.put(DiskRead(job.tag, data if is_whole else None, job.checksum))


class HostCopies:
    """Of a cache in the host's memory: complete on return."""

    def __init__(self, caches: Sequence[Tensor], pool: Tensor) -> None:
        self._caches, self._pool = caches, pool

    def save(self, pairs: Sequence[tuple[int, int]]) -> tuple[()]:
        """As ``BlockCopies.save``."""
        save_blocks(self._caches, self._pool, pairs)
        return ()

    def load(self, pairs: Sequence[tuple[int, int]]) -> tuple[()]:
        """As ``BlockCopies.load``."""
        load_blocks(self._pool, self._caches, pairs)
        return ()


class Copied(NamedTuple):
    """A step's copies. ``outcome``: of those, and of earlier steps' disk reads. ``finish`` returns when all
    copies between the cache and the host are complete, which the result of the step has to wait for: until
    then the scheduler gives none of the slots another content.
    """

    outcome: CopyOutcome | None
    finish: Callable[[], None]


class OffloadWorker:
    """The host tier and, if there is one, the disk tier below it; or the memory through which blocks go to
    and come from other servers, whose transfers have checksums of their own.
    """

    def __init__(
        self,
        kv_caches: Sequence[Tensor],
        num_host_slots: int,
        disk: DiskTier | None,
        memory: Tensor | None = None,
        *,
        device: Device | None = None,
        has_sums: bool = True,
    ) -> None:
        """``kv_caches``: one [2, num_blocks, kv_heads, block_size, head_size] per layer, of ``device``; None:
        in the host's memory. ``memory``: u8 for the blocks on the host, such as this rank's part of what
        transfers read and write; those have no checksums here.
        """
        self._has_sums = has_sums
        self._host = pool = host_pool(kv_caches, num_host_slots, memory)
        self._copies: HostCopies | BlockCopies = HostCopies(kv_caches, pool)
        if device is not None:
            self._copies = BlockCopies(kv_caches, pool, device)
        self._bytes = self._host.view(torch.uint8).view(num_host_slots, -1).numpy()
        self._host_sums = np.zeros(num_host_slots, np.int64)
        self._disk = disk
        self._disk_sums: dict[int, int] = {}
        self._has_reported_off = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the host tier."""
        return self._host.nbytes

    def copy(self, step: Step) -> Copied:
        """Start the step's copies, before its forward pass."""
        copies = step.copies
        lost: list[int] = []
        failed: list[int] = []
        running: list[BesideCopy] = []
        saved: Sequence[int] = ()
        if copies is not None:
            lost = self._spill(copies.spills)
            running += self._copies.save(copies.saves)
            saved = [slot for _, slot in copies.saves]
            if not running or not {slot for slot, _ in copies.loads}.isdisjoint(saved):
                self._land(running, saved)
                running, saved = [], ()
            failed = [block for slot, block in copies.loads if self._has_sums and not self._is_intact(slot)]
            running += self._copies.load([pair for pair in copies.loads if pair[1] not in failed])
            self._fetch(copies)
        arrived, missed = self._collect(0.0 if step.rows else _IDLE_WAIT_SECONDS)
        is_off = self._disk is not None and self._disk.is_off and not self._has_reported_off
        self._has_reported_off |= is_off
        outcome = None
        if lost or failed or arrived or missed or is_off:
            outcome = CopyOutcome(tuple(failed), tuple(arrived), tuple(missed), tuple(lost), is_off)
        return Copied(outcome, partial(self._land, running, saved))

    def warm_up(self) -> None:
        """Copy a block to the host and back, which compiles what does so. No block may be in use."""
        for running in (*self._copies.save([(0, 0)]), *self._copies.load([(0, 0)])):
            running.wait()

    def close(self) -> None:
        """Free the disk tier's space."""
        if self._disk is not None:
            self._disk.close()

    def _spill(self, pairs: Sequence[tuple[int, int]]) -> list[int]:
        lost = []
        for slot, place in pairs:
            assert self._disk is not None
            if self._disk.write(place, self._bytes[slot].tobytes()):
                self._disk_sums[place] = int(self._host_sums[slot])
            else:
                self._disk_sums.pop(place, None)
                lost.append(place)
        return lost

    def _land(self, running: Sequence[BesideCopy], saved: Sequence[int]) -> None:
        """Wait for copies, and note what was saved in these slots."""
        for each in running:
            each.wait()
        for slot in saved if self._has_sums else ():
            self._host_sums[slot] = checksum(self._bytes[slot].data)

    def _is_intact(self, slot: int) -> bool:
        return checksum(self._bytes[slot].data) == int(self._host_sums[slot])

    def _fetch(self, copies: Copies) -> None:
        for place, slot in copies.fetches:
            assert self._disk is not None
            self._disk.read(place, slot, self._disk_sums.get(place, -1))

    def _collect(self, timeout: float) -> tuple[list[int], list[int]]:
        """(host slots that disk reads have filled, host slots whose read failed)."""
        arrived: list[int] = []
        missed: list[int] = []
        for slot, data, its_sum in self._disk.collect(timeout) if self._disk is not None else ():
            if data is None:
                missed.append(slot)
                continue
            self._bytes[slot] = np.frombuffer(data, np.uint8)
            self._host_sums[slot] = its_sum
            arrived.append(slot)
        return arrived, missed
