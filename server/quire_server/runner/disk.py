"""The disk below the host's memory: one nameless file of block-sized slots, written and read by one thread.

Called by ``runner.tiers``; nothing here blocks the engine's thread. The file has no name from the moment it
exists, so that the kernel takes its space back however the process ends, and nobody ever reads what another
process left. Requests run in the order in which they were made. Any error of the disk, or a read that takes
too long, gives the disk up for good: one line in the log, and everything on its way is missed.
"""

import logging
import os
import queue
import tempfile
import threading
import time
import zlib
from collections import deque
from pathlib import Path
from typing import NamedTuple

import numpy as np

logger = logging.getLogger(__name__)

_MAX_WAITING_BYTES = 64 << 20  # of blocks to be written; more are dropped
_READ_SECONDS = 5.0  # a disk slower than this is of no use
_ROW_BYTES = 4096


def checksum(block: bytes | memoryview) -> int:
    """32 bits that tell whether a block is what it was: CRC-32 of row and column sums of its 64-bit words.

    A flipped bit shows in one of each, lost or exchanged pages in their rows. A CRC of all bytes takes four
    times as long, and would be most of what a copy costs.
    """
    whole = len(block) - len(block) % _ROW_BYTES
    words = np.frombuffer(block, np.uint64, whole // 8).reshape(-1, _ROW_BYTES // 8)
    sums = zlib.crc32(words.sum(0).tobytes(), zlib.crc32(words.sum(1).tobytes()))
    return zlib.crc32(block[whole:], sums)


class Arrival(NamedTuple):
    """What became of a read: the bytes, which have this checksum, or None."""

    tag: int
    data: bytes | None
    checksum: int = 0


class _Job(NamedTuple):
    slot: int
    data: bytes | None  # to write; None reads
    tag: int
    checksum: int


class Disk:
    """``write`` and ``read`` queue, ``collect`` brings the results; all from the engine's thread."""

    def __init__(self, directory: Path, num_slots: int, slot_bytes: int) -> None:
        """Raises OSError when nothing can be written there."""
        self.num_slots = num_slots
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115  (as long as the process)
        self._slot_bytes = slot_bytes
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._max_waiting = max(4, _MAX_WAITING_BYTES // slot_bytes)
        self._reads: deque[tuple[int, float]] = deque()  # tag, when it was asked for
        self._error: OSError | None = None
        self._is_off = False
        self._thread = threading.Thread(target=self._run, name="kv-disk", daemon=True)
        self._thread.start()

    @property
    def is_off(self) -> bool:
        """The disk was given up."""
        return self._is_off

    def write(self, slot: int, data: bytes) -> bool:
        """Queue a block for a slot; False when too much waits already, or the disk is off."""
        if self._is_off or self._jobs.qsize() >= self._max_waiting:
            return False
        self._jobs.put(_Job(slot, data, -1, 0))
        return True

    def read(self, slot: int, tag: int, checksum: int) -> None:
        """Queue a read; its arrival carries the tag. Bytes with another checksum are none."""
        self._reads.append((tag, time.monotonic()))
        self._jobs.put(_Job(slot, None, tag, checksum))

    def collect(self, timeout: float) -> list[Arrival]:
        """Reads that are done, waiting so many seconds for the first of them if any is to come."""
        arrivals: list[Arrival] = []
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
            arrivals += [Arrival(tag, None) for tag, _ in self._reads]
            self._reads.clear()
        return arrivals

    def close(self) -> None:
        """End the thread and give the space back."""
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
                    self._done.put(Arrival(job.tag, None))

    def _do(self, job: _Job) -> None:
        offset = job.slot * self._slot_bytes
        if job.data is not None:
            if self._error is None and os.pwrite(self._file.fileno(), job.data, offset) < len(job.data):
                raise OSError("a block was written in part only: the disk is full")
            return
        data = os.pread(self._file.fileno(), self._slot_bytes, offset)
        is_whole = self._error is None and len(data) == self._slot_bytes and checksum(data) == job.checksum
        self._done.put(Arrival(job.tag, data if is_whole else None, job.checksum))
