"""An upload: the fields of a multipart body, and the file, which is spooled to the disk up to a limit."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from typing import BinaryIO

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from quire_batch.contents import CHUNK_BYTES
from quire_batch.space import NEW, Space
from quire_http.errors import ApiError, bad_field

_FRAME_BYTES = 64 << 10  # of a body around its file
_MAX_NAME = 255


class Upload:
    """What came. Closed by the caller, which deletes the spooled file."""

    def __init__(self, name: str, purpose: str, file: BinaryIO) -> None:
        self.name = name
        self.purpose = purpose
        self._file = file

    def parts(self) -> Iterator[bytes]:
        """Its bytes, from the beginning."""
        self._file.seek(0)
        while part := self._file.read(CHUNK_BYTES):
            yield part

    def close(self) -> None:
        """The spooled file goes."""
        self._file.close()


def announced_bytes(request: Request, most_bytes: int) -> int:
    """At least so long is the file by its header, 0 where that is not known. Raises ApiError."""
    announced = request.headers.get("content-length", "0")
    length = int(announced) if announced.isdecimal() else 0
    if length > most_bytes + _FRAME_BYTES:
        raise _too_long(most_bytes)
    return max(length - _FRAME_BYTES, 0)


async def receive(request: Request, most_bytes: int, space: Space) -> Upload:
    """Raises ApiError, and ContentsError or OSError where the disk is full."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise ApiError(400, "The body must be multipart/form-data with the fields file and purpose.")
    parser = MultiPartParser(request.headers, _limited(request, most_bytes, space), max_files=1, max_fields=8)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise ApiError(400, f"The body cannot be read: {error.message}") from None
    file, purpose = form.get("file"), form.get("purpose")
    try:
        if not isinstance(file, UploadFile):
            raise bad_field("file", "is required, with a filename")
        if purpose != "batch":
            raise bad_field("purpose", "must be batch")
        if (file.size or 0) > most_bytes:
            raise _too_long(most_bytes)
    except ApiError:
        await form.close()
        raise
    return Upload(_name(file.filename or ""), purpose, file.file)


def _name(given: str) -> str:
    """What is shown of a client's filename: its last part. It is no path here."""
    last = given.replace("\\", "/").rpartition("/")[2]
    return "".join(one for one in last if one.isprintable())[:_MAX_NAME] or "file"


async def _limited(request: Request, most_bytes: int, space: Space) -> AsyncGenerator[bytes, None]:
    size = checked = 0
    async for part in request.stream():
        size += len(part)
        if size > most_bytes + _FRAME_BYTES:
            raise _too_long(most_bytes)
        if size - checked >= CHUNK_BYTES:
            await run_in_threadpool(space.check, NEW)
            checked = size
        yield part


def _too_long(most_bytes: int) -> ApiError:
    message = f"file: is longer than {most_bytes} bytes: divide it"
    return ApiError(413, message, param="file", code="file_too_long")
