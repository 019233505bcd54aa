"""The HTTP application: the routes, the probes, and what errors become. A caller sees what is its own."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from quire_batch import batch_routes, context, file_routes, job_routes
from quire_batch.body_limit import BodyLimit
from quire_batch.context import NO_RETRY, Context, Server
from quire_batch.patience import PASSING, brief
from quire_batch.store import QuotaError
from quire_http.errors import ApiError, from_exception

_RETRY_AFTER_SECONDS = 5
_FULL = ("database or disk is full", "No space left on device", "Disk quota exceeded")

_probes = APIRouter()


def application(shared: Context) -> FastAPI:
    """The ASGI application."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.state.context = shared
    app.add_middleware(BodyLimit)
    known = (ApiError, ClientDisconnect, HTTPException, OSError, QuotaError, RequestValidationError)
    for kind in (*known, *PASSING, Exception):
        app.add_exception_handler(kind, _error)
    for router in (file_routes.router, batch_routes.router, job_routes.router, _probes):
        app.include_router(router)
    return app


@_probes.get("/healthz")
async def healthz() -> Response:
    """The event loop turns."""
    return JSONResponse({"ok": True})


@_probes.get("/readyz")
def readyz(server: Server) -> Response:
    """The database answers, and this process is not about to end."""
    try:
        server.store.ping()
    except PASSING as error:
        return JSONResponse({"ok": False, "reason": brief(error)}, 503)
    is_ready = server.is_ready()
    return JSONResponse({"ok": is_ready, "reason": "" if is_ready else "Draining"}, 200 if is_ready else 503)


@_probes.get("/metrics")
def metrics(server: Server) -> Response:
    """For Prometheus."""
    text, kind = server.metrics.exposition()
    return Response(text, media_type=kind)


async def _error(request: Request, error: Exception) -> Response:
    answer = _translated(error)
    if answer.status in (503, 507):
        context.of(request).metrics.store_errors.inc()
    return JSONResponse(answer.body, answer.status, dict(answer.headers))


def _translated(error: Exception) -> ApiError:
    if isinstance(error, QuotaError):
        return ApiError(429, str(error), kind="rate_limit_error", code="quota_exceeded", headers=NO_RETRY)
    if isinstance(error, (OSError, *PASSING)):
        return _store_error(error)
    if isinstance(error, ClientDisconnect):  # in the middle of its upload: no one reads this
        return ApiError(400, "The body ended early.")
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return ApiError(400, "The body is not valid JSON.")
        param = ".".join(str(part) for part in first["loc"][1:]) or None
        return ApiError(400, f"{param or 'body'}: {first['msg']}", param=param)
    if isinstance(error, HTTPException):
        headers = tuple((error.headers or {}).items())
        code = "not_found" if error.status_code == 404 else None
        return ApiError(error.status_code, str(error.detail), code=code, headers=headers)
    return from_exception(error)


def _store_error(error: Exception) -> ApiError:
    """Of a disk that is full, or a database that is away."""
    text = brief(error)
    if getattr(error, "is_full", False) or any(one in text for one in _FULL):
        message = "There is no space left for files and batches: delete some, or have the volume made larger."
        return ApiError(507, message, kind="server_error", code="storage_full", headers=NO_RETRY)
    message = "The store of batches does not answer now; ask again."
    headers = (("retry-after", str(_RETRY_AFTER_SECONDS)),)
    return ApiError(503, message, kind="overloaded_error", code="store_unavailable", headers=headers)
