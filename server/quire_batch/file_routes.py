"""OpenAI's /v1/files. Routes that wait for the store are plain functions, which FastAPI runs in threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool

from quire_batch import objects, upload
from quire_batch.context import NO_RETRY, After, Context, Id, Server, Who, not_found
from quire_batch.identity import Caller
from quire_batch.records import File, new_id
from quire_batch.space import NEW
from quire_batch.store import BusyFileError
from quire_batch.upload import Upload
from quire_http.errors import ApiError, limited

router = APIRouter(prefix="/v1/files")

_MOST = 10_000
_UPLOADS = 4  # of a client at once: each is spooled to the disk
_RETRY_AFTER_SECONDS = 5


@router.post("")
async def create(request: Request, server: Server, caller: Who) -> Response:
    """Take an upload."""
    most = server.settings.quotas.file_bytes
    with _one_of_few(server.uploads, caller.client):
        await run_in_threadpool(_check, server, caller, upload.announced_bytes(request, most))
        received = await upload.receive(request, most, server.space)
        try:
            return await run_in_threadpool(_create, server, caller, received)
        finally:
            received.close()


@router.get("")
def list_(
    server: Server,
    caller: Who,
    after: After = "",
    limit: Annotated[int, Query(ge=1, le=_MOST)] = _MOST,
    purpose: Annotated[str, Query(pattern="^[a-z_]{0,64}$")] = "",
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """A client's files."""
    found = server.store.files(caller.client, purpose, after, limit + 1, is_ascending=order == "asc")
    return JSONResponse(objects.page([objects.file(one) for one in found], limit))


@router.get("/{id}")
def get(file_id: Id, server: Server, caller: Who) -> Response:
    """One file."""
    return JSONResponse(objects.file(_file(server, caller, file_id)))


@router.get("/{id}/content")
def content(file_id: Id, server: Server, caller: Who) -> Response:
    """Its bytes."""
    file = _file(server, caller, file_id)
    headers = {"content-length": str(file.bytes), "x-content-type-options": "nosniff"}
    parts = _begun(server.contents.read(file.id))
    return StreamingResponse(parts, headers=headers, media_type="application/octet-stream")


@router.delete("/{id}")
def delete(file_id: Id, server: Server, caller: Who) -> Response:
    """Delete it."""
    try:
        if not server.store.delete_file(caller.client, file_id):
            raise not_found("file", file_id)
    except BusyFileError as error:
        raise ApiError(409, str(error), code="file_in_use", headers=NO_RETRY) from None
    server.contents.delete(file_id)
    return JSONResponse({"id": file_id, "object": "file", "deleted": True})


@contextmanager
def _one_of_few(uploads: Counter[str], client: str) -> Iterator[None]:
    """An upload of this client, which has few at once: the quota counts none before it is over."""
    if uploads[client] >= _UPLOADS:
        raise limited(f"This client may send {_UPLOADS} files at once.", _RETRY_AFTER_SECONDS)
    uploads[client] += 1
    try:
        yield
    finally:
        uploads[client] -= 1
        if not uploads[client]:
            del uploads[client]


def _check(server: Context, caller: Caller, announced: int) -> None:
    """Before anything is spooled. Raises ContentsError, QuotaError."""
    server.space.check(NEW, announced)
    server.store.check_bytes(caller.client, announced, server.settings.quotas.client_bytes)


def _create(server: Context, caller: Caller, received: Upload) -> Response:
    id_ = new_id("file-")
    file = File(
        id=id_,
        owner=caller.client,
        filename=received.name,
        purpose=received.purpose,
        bytes=server.contents.write(id_, server.space.guarded(NEW, received.parts(), len)),
        created_at=int(server.clock()),
    )
    try:
        server.store.add_file(file, server.settings.quotas.client_bytes)
    except BaseException:
        server.contents.delete(id_)
        raise
    return JSONResponse(objects.file(file))


def _file(server: Context, caller: Caller, id_: str) -> File:
    if (file := server.store.file(caller.client, id_)) is None:
        raise not_found("file", id_)
    return file


def _begun(parts: Iterator[bytes]) -> Iterator[bytes]:
    """The same, with the first part read: what fails then is still an answer with an error."""
    first = next(parts, b"")

    def all_() -> Iterator[bytes]:
        yield first
        yield from parts

    return all_()
