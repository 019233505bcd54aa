"""/v1/jobs: one request whose answer is asked for later, by its client or by a webhook's receiver."""

from __future__ import annotations

from typing import Any, Literal

import orjson
from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict

from quire_batch import objects
from quire_batch.context import Context, Id, Server, Who, not_found
from quire_batch.lines import ENDPOINTS, Line, LineError, request
from quire_batch.records import Batch, Status
from quire_batch.space import NEW
from quire_batch.webhook import WebhookError, origin
from quire_http.errors import bad_field

router = APIRouter(prefix="/v1/jobs")


class NewJob(BaseModel):
    """The body of POST."""

    model_config = ConfigDict(extra="forbid")

    endpoint: Literal[ENDPOINTS]  # type: ignore[valid-type]  # they are literals
    body: dict[str, Any]
    webhook: str | None = None


@router.post("", status_code=202)
def create(body: NewJob, server: Server, caller: Who) -> Response:
    """Submit one request."""
    server.space.check(NEW)
    if body.webhook is not None:
        _check_webhook(server, body.webhook)
    try:
        line = Line(1, "job", *request(body.body))
    except LineError as error:
        raise bad_field(error.param or "body", str(error), error.code) from None
    if orjson.loads(line.body) != body.body:  # it has become null, which asks for something else
        raise bad_field("body", "has a number that is not finite", "invalid_body")
    job = server.new(
        "job_",
        caller,
        is_job=True,
        endpoint=str(body.endpoint),
        status=Status.IN_PROGRESS,
        total=1,
        webhook=body.webhook or "",
    )
    server.store.add(job, server.settings.quotas.jobs, line)
    server.wake()
    return _answer(server, job, 202)


@router.get("/{id}")
def get(job_id: Id, server: Server, caller: Who) -> Response:
    """One job, with its answer when there is one."""
    if (job := server.store.batch(caller.client, job_id, is_job=True)) is None:
        raise not_found("job", job_id)
    return _answer(server, job)


@router.delete("/{id}")
@router.post("/{id}/cancel")
def cancel(job_id: Id, server: Server, caller: Who) -> Response:
    """Its answer is not wanted any more. One that is over stays as it is."""
    if (job := server.store.cancel(caller.client, job_id, server.clock(), is_job=True)) is None:
        raise not_found("job", job_id)
    server.wake()
    return _answer(server, job)


def _answer(server: Context, job: Batch, status: int = 200) -> Response:
    content = orjson.dumps(objects.job(job, server.store.result(job.id)))
    return Response(content, status, media_type="application/json")


def _check_webhook(server: Context, url: str) -> None:
    """Raises a 400."""
    try:
        target = origin(url)
    except WebhookError as error:
        raise bad_field("webhook", str(error), "invalid_webhook") from None
    if not server.settings.webhooks:
        message = "none is allowed here: poll the job, or have the chart's batch.webhooks.allow changed"
        raise bad_field("webhook", message, "webhooks_disabled")
    if target not in server.settings.webhooks:
        message = "its scheme, host and port are none of the chart's batch.webhooks.allow"
        raise bad_field("webhook", message, "webhook_not_allowed")
