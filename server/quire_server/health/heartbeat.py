"""The shared memory between the processes of one server: a few small slots in a file, each with one writer.

The engine writes `Heartbeat` and the last `RankEcho` of every rank of its model, also of those of other
nodes; the supervisor writes `Control`, each `Process` the time at which it last ran (a beat), and each rank
of this node the number of its last step. The other processes read.
A slot has a checksum, so a reader never uses a half-written sample: it uses the previous one, whose age shows
how current it is. All times are CLOCK_MONOTONIC, which the processes of a machine share.
"""

from __future__ import annotations

import enum
import mmap
import struct
import threading
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from quire_server.core.topology import MAX_RANKS

_FILE = "heartbeat"
_CONTROL_OFFSET = 2048
_BEATS_OFFSET, _BEAT_SIZE = 4096, 64
_STEPS_OFFSET, _STEP_SIZE = 8192, 64
_ECHOES_OFFSET, _ECHO_SIZE = 12288, 64
_FILE_SIZE = 16384
_CHECKSUM = struct.Struct("<I")
_HEARTBEAT = struct.Struct("<dB?IIQQQddddd32sB?d")
_CONTROL = struct.Struct("<?32s16s")
_BEAT = struct.Struct("<d")
_STEP = struct.Struct("<Qd")
_ECHO = struct.Struct("<QdddQ")
_READ_ATTEMPTS = 50
BEAT_SECONDS = 0.5  # between two beats of a process


class Phase(enum.IntEnum):
    """The phase of the engine."""

    LOADING = 1
    WARMING = 2
    SERVING = 3


class Process(enum.Enum):
    """The processes that beat; the value is the number of the slot. The health process is missing: the
    kubelet's probes show whether it runs.
    """

    SUPERVISOR = 0
    ENGINE = 1
    API = 2


#: When each process ran last. A number is another rank of the engine than the first.
Beats = Mapping["Process | int", float]


class Heartbeat(NamedTuple):
    """The state of the engine. A NamedTuple, because one is made with every step."""

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
    progress_at: float  # time of the last loaded bytes, the last step, or the last moment without work
    proof_at: float  # time of the last answered request or right canary
    kv_utilization: float
    reason: str  # why the engine is unready, "" when it is not
    lost_rank: int = 0  # that did not echo a step; 0: none
    transfer_degraded: bool = False  # the last prefix from another server had to be computed here
    requested_at: float = 0.0  # time of the last moment with a request, or of the start to serve

    def pack(self) -> bytes:
        """The slot's bytes."""
        return _HEARTBEAT.pack(*self[:_REASON], self.reason.encode("ascii"), *self[_REASON + 1 :])

    @classmethod
    def unpack(cls, payload: bytes) -> Heartbeat:
        """The sample in a slot's bytes."""
        fields: list[Any] = list(_HEARTBEAT.unpack(payload))
        fields[1] = Phase(fields[1])
        fields[_REASON] = fields[_REASON].rstrip(b"\0").decode("ascii")
        return cls(*fields)


_REASON = Heartbeat._fields.index("reason")


class RankEcho(NamedTuple):
    """What a rank has done, by its echoes. ``at``: when the last one came. Times to compute are without those
    in which the rank waited for others.
    """

    number: int  # of the last step that it echoed
    at: float
    step_seconds: float  # to compute the last step that had something to compute
    busy_seconds: float  # to compute all steps
    exchanged_bytes: int  # in all steps


@dataclass(frozen=True)
class Control:
    """The state that the supervisor sets for the health process."""

    draining: bool = False
    failed: str = ""  # the reason why the server is ending
    killed: str = ""  # the process whose end by SIGKILL is that reason

    def pack(self) -> bytes:
        """The slot's bytes."""
        return _CONTROL.pack(self.draining, self.failed.encode("ascii"), self.killed.encode("ascii"))

    @classmethod
    def unpack(cls, payload: bytes) -> Control:
        """The control in a slot's bytes."""
        draining, *texts = _CONTROL.unpack(payload)
        return cls(draining, *(text.rstrip(b"\0").decode("ascii") for text in texts))


class SharedState:
    """The mapped file; every process of the server opens it by the run directory."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._last_valid: dict[int, bytes] = {}  # by offset: the last payload with a correct checksum

    @classmethod
    def create(cls, run_dir: Path) -> SharedState:
        """Create the file: once, by the supervisor, before it starts any process."""
        (run_dir / _FILE).write_bytes(bytes(_FILE_SIZE))
        return cls.open(run_dir)

    @classmethod
    def open(cls, run_dir: Path) -> SharedState:
        """Map the file that the supervisor created."""
        with (run_dir / _FILE).open("r+b") as file:
            return cls(mmap.mmap(file.fileno(), _FILE_SIZE))

    def write_heartbeat(self, sample: Heartbeat) -> None:
        """Write the engine's slot."""
        self._write(0, sample.pack())

    def write_control(self, control: Control) -> None:
        """Write the supervisor's slot."""
        self._write(_CONTROL_OFFSET, control.pack())

    def beat(self, process: Process | int) -> None:
        """Write the time as the last at which this process ran."""
        self._write(_beat_offset(process), _BEAT.pack(time.monotonic()))

    def beat_by_thread(self, process: Process | int) -> None:
        """Beat until the process ends, for one whose main thread computes for seconds without a pause."""

        def run() -> None:
            while True:
                self.beat(process)
                time.sleep(BEAT_SECONDS)

        threading.Thread(target=run, name="beat", daemon=True).start()

    def read_beats(self) -> Beats:
        """When each process ran last; a process that has not beaten yet is missing."""
        writers = (*Process, *range(1, MAX_RANKS))
        payloads = {process: self._read(_beat_offset(process), _BEAT.size) for process in writers}
        return {process: _BEAT.unpack(found)[0] for process, found in payloads.items() if found is not None}

    def write_step(self, rank: int, number: int) -> None:
        """Write the number of the last step of a rank."""
        self._write(_STEPS_OFFSET + rank * _STEP_SIZE, _STEP.pack(number, time.monotonic()))

    def read_steps(self) -> Mapping[int, int]:
        """The last step of each rank of this node that has taken one."""
        payloads = {rank: self._read_step(rank) for rank in range(MAX_RANKS)}
        return {rank: _STEP.unpack(found)[0] for rank, found in payloads.items() if found is not None}

    def read_sent_at(self) -> float:
        """When rank 0 sent its last step, 0 before the first."""
        payload = self._read_step(0)
        return 0.0 if payload is None else float(_STEP.unpack(payload)[1])

    def _read_step(self, rank: int) -> bytes | None:
        return self._read(_STEPS_OFFSET + rank * _STEP_SIZE, _STEP.size)

    def write_echo(self, rank: int, echo: RankEcho) -> None:
        """Write what a rank has done, of whichever node."""
        self._write(_ECHOES_OFFSET + rank * _ECHO_SIZE, _ECHO.pack(*echo))

    def read_echoes(self) -> Mapping[int, RankEcho]:
        """What each rank that has echoed a step has done; nothing on a node without rank 0."""
        payloads = {
            rank: self._read(_ECHOES_OFFSET + rank * _ECHO_SIZE, _ECHO.size) for rank in range(MAX_RANKS)
        }
        return {rank: RankEcho(*_ECHO.unpack(found)) for rank, found in payloads.items() if found is not None}

    def read_heartbeat(self) -> Heartbeat | None:
        """The last valid sample, None before the first one."""
        payload = self._read(0, _HEARTBEAT.size)
        return None if payload is None else Heartbeat.unpack(payload)

    def read_control(self) -> Control:
        """The last valid control."""
        payload = self._read(_CONTROL_OFFSET, _CONTROL.size)
        return Control() if payload is None else Control.unpack(payload)

    def _write(self, offset: int, payload: bytes) -> None:
        # + 1: the checksum of an empty slot (all zeros) must be wrong.
        slot = payload + _CHECKSUM.pack((zlib.crc32(payload) + 1) & 0xFFFFFFFF)
        self._memory[offset : offset + len(slot)] = slot

    def _read(self, offset: int, size: int) -> bytes | None:
        for _ in range(_READ_ATTEMPTS):
            slot = self._memory[offset : offset + size + _CHECKSUM.size]
            payload = slot[:size]
            if not any(slot):
                break  # it was never written: a valid one has a checksum other than zero
            if _CHECKSUM.unpack(slot[size:])[0] == (zlib.crc32(payload) + 1) & 0xFFFFFFFF:
                self._last_valid[offset] = payload
                break
        # The writer may have been interrupted in the middle of a write: use the last valid payload.
        return self._last_valid.get(offset)


def _beat_offset(process: Process | int) -> int:
    slot = len(Process) - 1 + process if isinstance(process, int) else process.value
    return _BEATS_OFFSET + slot * _BEAT_SIZE
