"""A small file system, and how it is filled."""

import contextlib
import os
import shutil
import subprocess

import pytest

MIB = 1 << 20


@contextlib.contextmanager
def small_disk(path, mebibytes):
    """A directory with a file system of its own."""
    if os.geteuid() != 0:
        pytest.skip("a file system of its own needs root")
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


def fill(path, free=0):
    """Until so many bytes are free, or not a byte more can be written. Returns the file that does it."""
    ballast = path / "ballast"
    with ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while shutil.disk_usage(path).free > free:
            file.write(b"x" * 4096)
    if not free:
        more = path / "more"
        with pytest.raises(OSError, match="No space left"):
            more.write_bytes(b"x" * 8192)
        more.unlink()
    return ballast
