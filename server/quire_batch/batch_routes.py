"""OpenAI's /v1/batches."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from quire_batch import objects
from quire_batch.context import ID, NO_RETRY, After, Id, Server, Who, not_found
from quire_batch.lines import ENDPOINTS
from quire_batch.records import Status
from quire_batch.space import NEW
from quire_batch.store import MissingFileError
from quire_http.errors import ApiError, bad_field

router = APIRouter(prefix="/v1/batches")

_Key = Annotated[str, Field(max_length=64)]
_Value = Annotated[str, Field(max_length=512)]


class NewBatch(BaseModel):
    """The body of POST. What is not known is refused rather than ignored."""

    model_config = ConfigDict(extra="forbid")

    input_file_id: Annotated[str, Field(pattern=ID)]
    endpoint: Literal[ENDPOINTS]  # type: ignore[valid-type]  # they are literals
    completion_window: Literal["24h"]
    metadata: Annotated[dict[_Key, _Value], Field(max_length=16)] | None = None


@router.post("")
def create(body: NewBatch, server: Server, caller: Who) -> Response:
    """Submit a file."""
    server.space.check(NEW)
    batch = server.new(
        "batch_",
        caller,
        endpoint=str(body.endpoint),
        status=Status.VALIDATING,
        input_file_id=body.input_file_id,
        details={"metadata": body.metadata},
    )
    try:
        server.store.add(batch, server.settings.quotas.batches)
    except MissingFileError as error:
        raise bad_field("input_file_id", str(error), "file_not_found") from None
    server.wake()
    return JSONResponse(objects.batch(batch))


@router.get("")
def list_(
    server: Server, caller: Who, after: After = "", limit: Annotated[int, Query(ge=1, le=100)] = 20
) -> Response:
    """A client's batches."""
    found = server.store.batches(caller.client, after, limit + 1)
    return JSONResponse(objects.page([objects.batch(one) for one in found], limit))


@router.get("/{id}")
def get(batch_id: Id, server: Server, caller: Who) -> Response:
    """One batch, with its progress."""
    if (batch := server.store.batch(caller.client, batch_id)) is None:
        raise not_found("batch", batch_id)
    return JSONResponse(objects.batch(batch))


@router.post("/{id}/cancel")
def cancel(batch_id: Id, server: Server, caller: Who) -> Response:
    """End it with what is done."""
    if (batch := server.store.cancel(caller.client, batch_id, server.clock())) is None:
        raise not_found("batch", batch_id)
    if batch.status not in (Status.CANCELLING, Status.CANCELLED):
        message = f"{batch_id} is {batch.status}: there is nothing to cancel"
        raise ApiError(409, message, code="batch_is_over", headers=NO_RETRY)
    server.wake()
    return JSONResponse(objects.batch(batch))
