"""Downloads one file to the disk: resumed at the end of what is there, hashed on the way, and retried.

Used by several threads. Bytes that are on the disk already are read and hashed again, so that a download that
was killed, or a disk that lost its last writes, ends with the right bytes or with an error. Lost writes are
detected only if the source promises a digest, which S3 buckets need not do.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from quire_server.errors import DownloadError, ModelCorruptError, QuireServerError
from quire_server.fetch.progress import Progress
from quire_server.fetch.source import CHUNK_BYTES, Check, Listing, RemoteFile, SourceClient
from quire_server.model_dir.disk import disk_errors
from quire_server.model_dir.files import FileEntry

KEPT = "; what is there is kept"


class StoppedError(QuireServerError):
    """The download ended because another file failed."""


class _TooSlowError(DownloadError):
    """The connection is below the minimum rate, which does not count as progress."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a file is tried without progress, and the delays in between. A connection that transfers less
    than ``min_bytes_per_second`` for ``stall_seconds`` is closed, as with curl's --speed-limit.
    """

    attempts: int = 8
    stall_seconds: float = 60.0
    min_bytes_per_second: float = 4096.0
    first_delay: float = 0.5
    max_delay: float = 30.0

    def delay(self, failures: int, asked_for: float) -> float:
        """Seconds before the next attempt."""
        return max(asked_for, min(self.max_delay, self.first_delay * 2.0 ** (failures - 1)))


class Transfer:
    """Downloads files of one source until one fails for good."""

    def __init__(self, source: SourceClient, progress: Progress, retry: RetryPolicy) -> None:
        self._source = source
        self._progress = progress
        self._retry = retry
        self._stop = threading.Event()

    def stop(self) -> None:
        """End all transfers at their next chunk."""
        self._stop.set()

    def list_files(self, revision: str) -> Listing:
        """List the source's files, with the same retries."""
        failures = 0
        while True:
            try:
                return self._source.list_files(revision)
            except DownloadError as error:
                failures += 1
                self._wait(failures, error)

    def fetch(self, file: RemoteFile, path: Path) -> FileEntry:
        """Returns when the file is complete, verified and on the disk. Raises QuireServerError."""
        failures = mismatches = 0
        while True:
            before = path.stat().st_size if path.exists() else 0
            try:
                with disk_errors(path, KEPT):
                    return self._attempt(file, path)
            except DownloadError as error:
                has_more = path.exists() and path.stat().st_size > before
                is_further = has_more and not isinstance(error, _TooSlowError)
                failures = 1 if is_further else failures + 1
                self._wait(failures, error)
            except ModelCorruptError:
                # The first mismatch may be due to bytes of an earlier run.
                mismatches += 1
                path.unlink()
                if mismatches > 2:
                    raise

    def _wait(self, failures: int, error: DownloadError) -> None:
        """Wait before the next attempt, or raise the error if there are no attempts left."""
        if failures >= self._retry.attempts:
            raise error
        if self._stop.wait(self._retry.delay(failures, error.retry_after)):
            raise StoppedError

    def _attempt(self, file: RemoteFile, path: Path) -> FileEntry:
        hashes = _Hashes(file)
        with _appending(path) as target:
            position = self._hash_existing(file, target, hashes)
            if position < file.size:
                with contextlib.closing(self._source.read(file, position)) as chunks:
                    position = self._append(file, target, hashes, position, chunks)
            if position < file.size:
                raise DownloadError(f"{file.name} broke off after {position} of {file.size} bytes.")
            os.fsync(target.fileno())
        return hashes.entry()

    def _hash_existing(self, file: RemoteFile, target: BinaryIO, hashes: _Hashes) -> int:
        """Hash the bytes on the disk; returns their number."""
        if os.fstat(target.fileno()).st_size > file.size:
            target.truncate(0)
        target.seek(0)
        position = 0
        while chunk := target.read(CHUNK_BYTES):
            self._check_stop()
            hashes.update(chunk)
            position += len(chunk)
            self._progress.at(file.name, position)
        return position

    def _append(
        self, file: RemoteFile, target: BinaryIO, hashes: _Hashes, position: int, chunks: Iterator[bytes]
    ) -> int:
        for chunk in _at_least_rate(chunks, file, self._retry):
            self._check_stop()
            if position + len(chunk) > file.size:
                target.truncate(0)
                raise DownloadError(
                    f"{file.name} is longer than the {file.size} bytes that its source announced."
                )
            hashes.update(chunk)
            rest = memoryview(chunk)
            while rest:
                rest = rest[target.write(rest) :]
            position += len(chunk)
            self._progress.at(file.name, position, len(chunk))
        return position

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise StoppedError


def _at_least_rate(chunks: Iterator[bytes], file: RemoteFile, retry: RetryPolicy) -> Iterator[bytes]:
    """The chunks, as long as they arrive at the minimum rate. Time spent on disk writes does not count."""
    waited, received = 0.0, 0
    while True:
        asked = time.monotonic()
        chunk = next(chunks, None)
        if chunk is None:
            return
        waited, received = waited + time.monotonic() - asked, received + len(chunk)
        if waited >= retry.stall_seconds:
            if received < waited * retry.min_bytes_per_second:
                raise _TooSlowError(
                    f"{file.name} came at {received / waited:.0f} bytes/s for {waited:.0f} s. Check the "
                    "network, the proxy and the host."
                )
            waited, received = 0.0, 0
        yield chunk


class _Hashes:
    """sha256 of all bytes, and the digest that the source promised if that is another one."""

    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        self._size = 0
        self._sha256 = hashlib.sha256()
        self._other = _start(file.check, file.size)

    def update(self, chunk: bytes) -> None:
        self._size += len(chunk)
        self._sha256.update(chunk)
        if self._other is not None:
            self._other.update(chunk)

    def entry(self) -> FileEntry:
        """Raises ModelCorruptError if the bytes are not those that the source promised."""
        check = self._file.check
        found = self._sha256.hexdigest() if self._other is None else self._other.hexdigest()
        if check is not None and found != check.hex:
            raise ModelCorruptError(
                f"{self._file.name} has the {check.algorithm} {found}, and its source promises "
                f"{check.hex}. A proxy or "
                "a cache in between may hold an old copy; otherwise publish the model again."
            )
        return FileEntry(self._size, self._sha256.hexdigest())


def _start(check: Check | None, size: int) -> hashlib._Hash | None:
    match check.algorithm if check else "sha256":
        case "git-sha1":
            return hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
        case "md5":
            return hashlib.md5(usedforsecurity=False)
    return None


@contextlib.contextmanager
def _appending(path: Path) -> Iterator[BinaryIO]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    with os.fdopen(descriptor, "r+b", buffering=0) as file:
        yield file
