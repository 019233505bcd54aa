"""A model or an adapter in a directory of this machine, such as a mounted volume's, read like any other
source: bounded, hashed, resumed, and published whole.

Another user may write to the directory. So no link leads out of it: not the directory's own path out of
``root``, and not a file of it. A directory of the hub's cache may link to its blobs, in ``root`` as well.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterator
from pathlib import Path

from quire_server.errors import ConfigError, DownloadError, ModelNotFoundError
from quire_server.fetch.source import CHUNK_BYTES, Listing, LocalDirectory, RemoteFile
from quire_server.model_dir.files import ModelFiles


class DirectoryClient:
    """A ``SourceClient``."""

    def __init__(self, source: LocalDirectory, root: Path) -> None:
        self._path, self._root = str(source.path), Path(os.path.realpath(root))

    def list_files(self, revision: str) -> Listing:
        """The files in the directory. It has no revisions; a change of a file shows in its time."""
        del revision
        files = []
        with self._readable(), os.scandir(self._home()) as entries:
            for entry in entries:
                if entry.is_file():
                    facts = entry.stat()
                    version = str(facts.st_mtime_ns)
                    files.append(RemoteFile(entry.name, facts.st_size, None, version, entry.name))
        return Listing("", tuple(files))

    def read(self, file: RemoteFile, offset: int) -> Generator[bytes, None, None]:
        """One file."""
        with self._readable(), ModelFiles(self._home(), {}).opened_unchecked(file.place) as (opened, _):
            self._check_inside(os.readlink(f"/proc/self/fd/{opened.fileno()}"))
            opened.seek(offset)
            while chunk := opened.read(CHUNK_BYTES):
                yield chunk

    def close(self) -> None:
        """Nothing to do: files are closed where they are read."""

    def _home(self) -> Path:
        home = os.path.realpath(self._path)
        self._check_inside(home)
        if not os.path.isdir(home):
            raise ModelNotFoundError(
                f"There is no directory {self._path} that user {os.getuid()} can read. Check the volume and "
                "the path."
            )
        return Path(home)

    def _check_inside(self, path: str) -> None:
        if not Path(path).is_relative_to(self._root):
            raise ConfigError(
                f"{self._path} leads out of {self._root} by a link. Copy the files there in place of it."
            )

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DownloadError(
                f"{self._path} cannot be read ({error.strerror}). Check the volume, and make its files "
                "readable: chmod -R a+rX."
            ) from None
