"""Leaves room on the disk: one that is full could not even delete what fills it.

What is new (an upload, a batch, a job) leaves the whole reserve, what batches that run write leaves half of
it, and the rest is for deletes and for answers that are on their way. The disk is looked at while bytes are
written, because how many will come is not always known, and because several write at once. Knows no quotas.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from quire_batch.contents import CHUNK_BYTES, ContentsError

_MOST_BYTES = 512 << 20
_SMALLEST_SHARE = 20  # of a small disk the reserve is a twentieth

#: The share of the reserve that stays free of who asks.
NEW, RUNNING = 1.0, 0.5

_Item = TypeVar("_Item")


def reserve(total_bytes: int) -> int:
    """Of a disk of this size."""
    return min(_MOST_BYTES, total_bytes // _SMALLEST_SHARE)


class Space:
    """That of a directory. None: all that stays is elsewhere, in a database and in a bucket."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    def check(self, share: float, more_bytes: int = 0) -> None:
        """Raises ContentsError where less than this share of the reserve is left, with so many bytes more."""
        if self._directory is None:
            return
        disk = shutil.disk_usage(self._directory)
        least = int(share * reserve(disk.total))
        if disk.free - more_bytes < least:
            raise ContentsError(f"No more than {disk.free >> 20} MiB of the disk are free.", is_full=True)

    def guarded(self, share: float, items: Iterable[_Item], size: Callable[[_Item], int]) -> Iterator[_Item]:
        """The same items, which are written one after the other. Raises ContentsError in between."""
        written = CHUNK_BYTES
        for one in items:
            written += size(one)
            if written >= CHUNK_BYTES:
                self.check(share)
                written = 0
            yield one
