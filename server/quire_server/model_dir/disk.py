"""What every writer of a model directory needs of the disk: errors that say what to do, and files that
survive a power failure.

A rename is durable before the bytes of the renamed files are, so they are synced first: otherwise a complete
model with its manifest could be found empty after a crash.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from quire_server.errors import ConfigError, DiskError

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_PERMISSION = {errno.EACCES, errno.EPERM, errno.EROFS}


@contextlib.contextmanager
def disk_errors(path: Path, kept: str = "") -> Iterator[None]:
    """Translate OSErrors into DiskError or ConfigError. ``kept``: what becomes of what was written."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise DiskError(
                f"There is no room for {path.name} ({error.strerror}). Enlarge the volume{kept}."
            ) from None
        if error.errno in _NO_PERMISSION:
            raise ConfigError(
                f"{path.parent} cannot be written by user {os.getuid()} ({error.strerror}). Mount it "
                "writable, with a group that this user has (fsGroup)."
            ) from None
        raise DiskError(f"{path} failed: {error.strerror}. Check the volume.") from None


def sync(path: Path) -> None:
    """Returns when a file's bytes, or a directory's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(staging: Path, to: Path) -> None:
    """Rename a directory to a name that is free (or an empty directory), once all of it is on the disk."""
    for path in staging.iterdir():
        sync(path)
    sync(staging)
    os.replace(staging, to)
    sync(to.parent)
