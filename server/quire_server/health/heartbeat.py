"""The shared memory between the processes of one server: a few small slots in a file, each with one writer.

The engine writes `Heartbeat`, the supervisor writes `Control`; the health process and the supervisor read.
A slot carries a checksum, so a reader never believes a half-written sample: the one before it counts, and its
age tells whether that is still true. All times are CLOCK_MONOTONIC, which the processes of a machine share.
"""

from __future__ import annotations

import enum
import mmap
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

_FILE = "heartbeat"
_FILE_SIZE = 4096
_CONTROL_OFFSET = 2048
_CHECKSUM = struct.Struct("<I")
_HEARTBEAT = struct.Struct("<dB?IIQQQddddd32s")
_CONTROL = struct.Struct("<?32s")
_READ_ATTEMPTS = 50


class Phase(enum.IntEnum):
    """What the engine is doing."""

    LOADING = 1
    WARMING = 2
    SERVING = 3


class Heartbeat(NamedTuple):
    """What the engine last said about itself. A NamedTuple: one is made with every step."""

    written_at: float
    phase: Phase
    work_pending: bool
    queued: int
    running: int
    steps: int
    loaded_bytes: int
    total_bytes: int
    started_at: float
    load_seconds: float  # 0 until loaded
    progress_at: float  # last byte loaded, last step done, or last moment without work
    proof_at: float  # last proof of inference
    kv_utilization: float
    reason: str  # why the engine is not to be trusted, "" when it is

    def pack(self) -> bytes:
        """The slot's bytes."""
        return _HEARTBEAT.pack(*self[:-1], self.reason.encode("ascii"))

    @classmethod
    def unpack(cls, payload: bytes) -> Heartbeat:
        """The sample in a slot's bytes."""
        fields: list[Any] = list(_HEARTBEAT.unpack(payload))
        fields[1] = Phase(fields[1])
        fields[-1] = fields[-1].rstrip(b"\0").decode("ascii")
        return cls(*fields)


@dataclass(frozen=True)
class Control:
    """What the supervisor tells the health process."""

    draining: bool = False
    failed: str = ""  # the reason why the server is about to end

    def pack(self) -> bytes:
        """The slot's bytes."""
        return _CONTROL.pack(self.draining, self.failed.encode("ascii"))

    @classmethod
    def unpack(cls, payload: bytes) -> Control:
        """The order in a slot's bytes."""
        draining, failed = _CONTROL.unpack(payload)
        return cls(draining, failed.rstrip(b"\0").decode("ascii"))


class SharedState:
    """The mapped file; every process of the server opens it by the run directory."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._whole: dict[int, bytes] = {}  # by offset: the last payload that was whole

    @classmethod
    def create(cls, run_dir: Path) -> SharedState:
        """Make the file; called once, by the supervisor, before any other process exists."""
        (run_dir / _FILE).write_bytes(bytes(_FILE_SIZE))
        return cls.open(run_dir)

    @classmethod
    def open(cls, run_dir: Path) -> SharedState:
        """Map the file that the supervisor made."""
        with (run_dir / _FILE).open("r+b") as file:
            return cls(mmap.mmap(file.fileno(), _FILE_SIZE))

    def write_heartbeat(self, sample: Heartbeat) -> None:
        """The engine's side."""
        self._write(0, sample.pack())

    def write_control(self, control: Control) -> None:
        """The supervisor's side."""
        self._write(_CONTROL_OFFSET, control.pack())

    def read_heartbeat(self) -> Heartbeat | None:
        """The last whole sample, None before the first one."""
        payload = self._read(0, _HEARTBEAT.size)
        return None if payload is None else Heartbeat.unpack(payload)

    def read_control(self) -> Control:
        """The supervisor's last word."""
        payload = self._read(_CONTROL_OFFSET, _CONTROL.size)
        return Control() if payload is None else Control.unpack(payload)

    def _write(self, offset: int, payload: bytes) -> None:
        # + 1: the checksum of an empty slot (all zeros) must not look right.
        slot = payload + _CHECKSUM.pack((zlib.crc32(payload) + 1) & 0xFFFFFFFF)
        self._memory[offset : offset + len(slot)] = slot

    def _read(self, offset: int, size: int) -> bytes | None:
        for _ in range(_READ_ATTEMPTS):
            slot = self._memory[offset : offset + size + _CHECKSUM.size]
            payload = slot[:size]
            if _CHECKSUM.unpack(slot[size:])[0] == (zlib.crc32(payload) + 1) & 0xFFFFFFFF:
                self._whole[offset] = payload
                break
        # The writer may have lost its CPU in the middle of a write; that is not "nothing was ever written".
        return self._whole.get(offset)
