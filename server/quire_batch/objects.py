"""Files, batches, jobs and results as OpenAI's API has them. Pure."""

from __future__ import annotations

from typing import Any

import orjson

from quire_batch.records import Batch, File, LineState, Result, Status

WINDOW = "24h"
#: What is said of lines that were not asked for to the end.
_REASONS = {
    LineState.EXPIRED: ("batch_expired", "The batch expired before this line was done."),
    LineState.CANCELLED: ("batch_cancelled", "The batch was cancelled before this line was done."),
}
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


def file(one: File) -> dict[str, Any]:
    """A file."""
    return {
        "id": one.id,
        "object": "file",
        "bytes": one.bytes,
        "created_at": one.created_at,
        "expires_at": None,
        "filename": one.filename,
        "purpose": one.purpose,
        "status": "processed",
        "status_details": None,
    }


def batch(one: Batch) -> dict[str, Any]:
    """A batch."""
    errors = one.details.get("errors")
    return {
        "id": one.id,
        "object": "batch",
        "endpoint": one.endpoint,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": one.input_file_id,
        "completion_window": WINDOW,
        "status": one.status,
        "output_file_id": one.output_file_id or None,
        "error_file_id": one.error_file_id or None,
        "created_at": one.created_at,
        "expires_at": one.expires_at,
        **{f"{name}_at": one.times.get(f"{name}_at") for name in _TIMES},
        "request_counts": {"total": one.total, "completed": one.completed, "failed": one.failed},
        "metadata": one.details.get("metadata") or None,
    }


def job(one: Batch, line: Result | None) -> dict[str, Any]:
    """A job, with its answer when it has one."""
    status = job_status(one, line)
    response, error = (
        answer(line) if line is not None and line.state is not LineState.WAITING else (None, None)
    )
    return {
        "id": one.id,
        "object": "job",
        "endpoint": one.endpoint,
        "status": status,
        "response": response,
        "error": error,
        "webhook": one.webhook or None,
        "created_at": one.created_at,
        "expires_at": one.expires_at,
    }


def job_status(one: Batch, line: Result | None) -> str:
    """queued, in_progress, completed, failed, expired or cancelled."""
    if one.status is Status.CANCELLING:
        return "cancelled"
    if line is not None and line.state is LineState.WAITING:
        return "queued"
    if line is not None and line.state is not LineState.RUNNING:
        return {LineState.DONE: "completed"}.get(line.state, str(line.state))
    return "in_progress"


def output_line(batch_id: str, result: Result) -> bytes:
    """A line of an output or error file."""
    response, error = answer(result)
    line = {
        "id": f"batch_req_{batch_id.removeprefix('batch_')}_{result.number}",
        "custom_id": result.custom_id,
        "response": response,
        "error": error,
    }
    return orjson.dumps(line) + b"\n"


def answer(result: Result) -> tuple[Any, Any]:
    """The `response` and the `error` of a line."""
    if result.result:
        return orjson.Fragment(result.result), None  # it may be nested too deep to be written again
    if result.state in _REASONS:
        code, message = _REASONS[result.state]
        return None, {"code": code, "message": message}
    return None, None


def page(objects: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """A page of a list that was asked for with one object more than it has."""
    shown = objects[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(objects) > limit,
    }
