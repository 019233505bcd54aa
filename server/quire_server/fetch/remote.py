"""What a source offers, and the two things that it can do: list its files, and read one from an offset.

`hub`, `buckets` and `registry` implement it; `transfer` and `directory` use it and know no protocol.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Check:
    """A digest that the source promises. `algorithm`: sha256, md5, or git-sha1 (of git's blob object)."""

    algorithm: str
    hex: str


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file. `version` is another when the content is; `place` is how its source finds it again."""

    name: str
    size: int
    check: Check | None
    version: str
    place: str


@dataclass(frozen=True, slots=True)
class Listing:
    """All files of a model at one moment. `revision`: its immutable name, empty where the source has none."""

    revision: str
    files: tuple[RemoteFile, ...]


class Remote(Protocol):
    """Errors are those of `core.errors`: AccessDeniedError, ModelNotFoundError, DownloadError (try again)."""

    def list_files(self, revision: str) -> Listing:
        """The files, at an immutable revision if one is given."""

    def read(self, file: RemoteFile, offset: int) -> Generator[bytes, None, None]:
        """The bytes from an offset on, in pieces; may end early. Close it when done."""

    def close(self) -> None:
        """Give connections back."""
