"""Why a server ended: reasons, exit codes, and the termination log.

Only the supervisor writes the termination log; its children leave their reason in the run directory. The
operator copies the log to `status.lastFailure`.
"""

from __future__ import annotations

import enum
import json
import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from quire_server.errors import (
    AccessDeniedError,
    CanaryMismatchError,
    ConfigError,
    DeviceError,
    DeviceMemoryError,
    DiskError,
    DownloadError,
    MixedRevisionError,
    ModelCorruptError,
    ModelNotFoundError,
    RankLostError,
)

logger = logging.getLogger(__name__)

MAX_LOG_BYTES = 2048
_FAILURE_FILE = "failure.json"

#: The exit code of a process that was ended by SIGKILL (128 + 9), for example for lack of memory.
KILLED_EXIT_CODE = 137


class Reason(enum.Enum):
    """The reason of a failure, as in the LLMDeployment's status."""

    CONFIG_ERROR = "ConfigError"
    MODEL_NOT_FOUND = "ModelNotFound"
    MODEL_CORRUPT = "ModelCorrupt"
    MODEL_ACCESS_DENIED = "ModelAccessDenied"
    MODEL_DOWNLOAD_FAILED = "ModelDownloadFailed"
    OUT_OF_DISK = "OutOfDisk"
    STARTUP_TIMEOUT = "StartupTimeout"
    LOAD_STALLED = "LoadStalled"
    GPU_OUT_OF_MEMORY = "GPUOutOfMemory"
    ENGINE_CRASHED = "EngineCrashed"
    ENGINE_STALLED = "EngineStalled"
    PROCESS_STALLED = "ProcessStalled"
    CANARY_MISMATCH = "CanaryMismatch"
    MIXED_REVISION = "MixedRevision"


EXIT_CODES = {
    Reason.CONFIG_ERROR: 2,
    Reason.MODEL_CORRUPT: 65,
    Reason.MODEL_NOT_FOUND: 66,
    Reason.MODEL_DOWNLOAD_FAILED: 69,
    Reason.ENGINE_CRASHED: 70,
    Reason.ENGINE_STALLED: 71,
    Reason.PROCESS_STALLED: 72,
    Reason.OUT_OF_DISK: 73,
    Reason.STARTUP_TIMEOUT: 74,
    Reason.LOAD_STALLED: 75,
    Reason.GPU_OUT_OF_MEMORY: 76,
    Reason.MODEL_ACCESS_DENIED: 77,
    Reason.CANARY_MISMATCH: 78,
    Reason.MIXED_REVISION: 79,
}


@dataclass(frozen=True)
class Failure:
    """Why the server ended, with a message that says what to do."""

    reason: Reason
    message: str

    @property
    def exit_code(self) -> int:
        """The process exit code of this failure."""
        return EXIT_CODES[self.reason]

    def to_json(self) -> str:
        """The termination log's text, at most MAX_LOG_BYTES long."""
        message = self.message
        while True:
            body = {"reason": self.reason.value, "message": message, "exitCode": self.exit_code}
            text = json.dumps(body)
            if len(text) <= MAX_LOG_BYTES:
                return text
            message = message[: len(message) - max(1, (len(text) - MAX_LOG_BYTES) // 6)]


_REASON_OF_ERROR = {  # the first match counts
    ConfigError: Reason.CONFIG_ERROR,
    ModelNotFoundError: Reason.MODEL_NOT_FOUND,
    ModelCorruptError: Reason.MODEL_CORRUPT,
    AccessDeniedError: Reason.MODEL_ACCESS_DENIED,
    DownloadError: Reason.MODEL_DOWNLOAD_FAILED,
    DiskError: Reason.OUT_OF_DISK,
    CanaryMismatchError: Reason.CANARY_MISMATCH,
    RankLostError: Reason.ENGINE_CRASHED,
    MixedRevisionError: Reason.MIXED_REVISION,
    DeviceMemoryError: Reason.GPU_OUT_OF_MEMORY,
    DeviceError: Reason.ENGINE_CRASHED,
}


def failure_of(error: Exception) -> Failure:
    """The failure for the termination log, from the error that ended a process."""
    for kind, reason in _REASON_OF_ERROR.items():
        if isinstance(error, kind):
            return Failure(reason, str(error))
    return Failure(
        Reason.ENGINE_CRASHED,
        f"The server met an unexpected {type(error).__name__}: {error}. "
        "The pod restarts; if it comes back, report it with the log.",
    )


def write_termination_log(path: Path, failure: Failure) -> None:
    """Write the log if the kubelet has created the file; outside a pod there is none. An error, such as a
    full disk, is only logged, so that the exit code is not lost as well.
    """
    try:
        if path.exists():
            path.write_text(failure.to_json(), encoding="utf-8")
    except OSError:
        logger.exception("cannot write the termination log", extra={"reason": failure.reason.value})


def leave_failure(run_dir: Path, failure: Failure) -> None:
    """Leave a child's failure in the run directory for the supervisor, unless another child has left one: the
    first is the cause of the others. An error, such as a full disk, is only logged: the exit code is left.
    """
    own = run_dir / f"{_FAILURE_FILE}.{os.getpid()}.{threading.get_native_id()}"
    try:
        try:
            own.write_text(failure.to_json(), encoding="utf-8")
            (run_dir / _FAILURE_FILE).hardlink_to(own)  # whole, or not at all
        finally:
            own.unlink(missing_ok=True)
    except FileExistsError:
        logger.info("another process has left its failure", extra={"reason": failure.reason.value})
    except OSError:
        logger.exception("cannot leave the failure", extra={"reason": failure.reason.value})


def find_failure(run_dir: Path) -> Failure | None:
    """The failure that a child left, or None."""
    try:
        body = json.loads((run_dir / _FAILURE_FILE).read_text(encoding="utf-8"))
        return Failure(Reason(body["reason"]), str(body["message"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
