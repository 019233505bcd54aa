"""The bytes of files, by their ids: in a directory, or in a bucket of S3.

obstore has one interface for both. A file is whole or not there. Ids are made here, so that no name of a
client's is ever a path.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, S3Store

if TYPE_CHECKING:  # it is no class when the program runs
    from obstore.store import S3Config

CHUNK_BYTES = 1 << 20
_NO_SPACE = ("os error 28", "os error 122")  # of Linux: ENOSPC, EDQUOT


class ContentsError(Exception):
    """The bytes cannot be read or written. ``is_full``: there is no space; ``is_missing``: no such file."""

    def __init__(self, message: str, *, is_full: bool = False, is_missing: bool = False) -> None:
        super().__init__(message)
        self.is_full = is_full
        self.is_missing = is_missing


class Contents:
    """All files. ``flush``: called with the id of one that was written."""

    def __init__(self, store: LocalStore | S3Store, flush: Callable[[str], None] = lambda _: None) -> None:
        self._store = store
        self._flush = flush

    @classmethod
    def in_directory(cls, directory: Path) -> Contents:
        """On a file system. Raises OSError."""
        directory.mkdir(parents=True, exist_ok=True)

        def flush(id_: str) -> None:
            """Onto the disk, with its name: the database says soon that it is there."""
            for path in (directory / id_, directory):
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

        return cls(LocalStore(directory), flush)

    @classmethod
    def in_bucket(cls, url: str, endpoint: str) -> Contents:
        """In S3: `s3://BUCKET/PREFIX`. ``endpoint``: of a store that is not AWS's. Credentials are those of
        the environment.
        """
        config: S3Config = {"endpoint": endpoint, "virtual_hosted_style_request": False} if endpoint else {}
        return cls(S3Store.from_url(url, config=config, client_options={"allow_http": True}))

    def write(self, id_: str, parts: Iterable[bytes]) -> int:
        """How many bytes there are. Raises ContentsError, and what ``parts`` raises: all is as before."""
        size = 0
        raised: Exception | None = None

        def counted() -> Iterator[bytes]:
            nonlocal size, raised
            try:
                for part in parts:
                    size += len(part)
                    yield part
            except Exception as error:  # obstore's error would say less
                raised = error
                raise

        try:
            obstore.put(self._store, id_, counted(), chunk_size=5 * CHUNK_BYTES)
            self._flush(id_)
        except Exception as error:
            if raised is not None:
                raise raised from None
            if not isinstance(error, (BaseError, OSError)):
                raise
            raise _translated(error) from None
        return size

    def read(self, id_: str) -> Iterator[bytes]:
        """Its bytes in order. Raises ContentsError, at the latest while they are read."""
        try:
            for part in obstore.get(self._store, id_).stream(min_chunk_size=CHUNK_BYTES):
                yield bytes(part)
        except (BaseError, OSError) as error:
            raise _translated(error) from None

    def delete(self, id_: str) -> None:
        """Also where it is not there. Raises ContentsError."""
        try:
            obstore.delete(self._store, id_)
        except FileNotFoundError:
            pass
        except (BaseError, OSError) as error:
            raise _translated(error) from None


def _translated(error: Exception) -> ContentsError:
    text = str(error)
    is_full = any(one in text for one in _NO_SPACE)
    is_missing = isinstance(error, FileNotFoundError)
    return ContentsError(text.partition("\n")[0], is_full=is_full, is_missing=is_missing)
