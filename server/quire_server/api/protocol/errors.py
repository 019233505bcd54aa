"""The errors of the API: OpenAI's error body, with a status that says whose fault it is.

Raised anywhere in `api` and turned into a response at the boundary of a request. `from_exception` translates
the errors of the layers below.
"""

from __future__ import annotations

from quire_server.engine.client import (
    EngineGoneError,
    RequestImpossibleError,
    RequestLostError,
    StepOutOfMemoryError,
)
from quire_server.errors import PromptTooLongError, RequestError

ENGINE_UNAVAILABLE = "engine_unavailable"
OUT_OF_MEMORY = "out_of_memory"  # given up for the sake of the others in its step
_RETRY_AFTER_LOADING = 5


class ApiError(Exception):
    """An error response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        self.headers = headers


def bad_field(param: str, message: str, code: str | None = None) -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def overloaded(reason: str, message: str, retry_after: int) -> ApiError:
    """A 503 that a client may retry elsewhere or later; the reason is the error's code."""
    headers = (("retry-after", str(retry_after)),)
    return ApiError(503, message, kind="overloaded_error", code=reason, headers=headers)


def limited(message: str, retry_after: int) -> ApiError:
    """A 429: the client exceeds a limit of its own."""
    headers = (("retry-after", str(retry_after)),)
    return ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded", headers=headers)


def from_exception(error: Exception) -> ApiError:
    """The response for an error of any layer; an unexpected one is a 500 without details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PromptTooLongError):
        return ApiError(400, str(error), param=error.param, code="context_length_exceeded")
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.param)
    if isinstance(error, EngineGoneError):
        return overloaded(ENGINE_UNAVAILABLE, str(error), _RETRY_AFTER_LOADING)
    if isinstance(error, StepOutOfMemoryError):
        return overloaded(OUT_OF_MEMORY, str(error), _RETRY_AFTER_LOADING)
    if isinstance(error, RequestImpossibleError):
        return ApiError(400, str(error), code="no_token_possible")
    if isinstance(error, RequestLostError):
        return ApiError(500, str(error), kind="server_error", code="request_failed")
    return ApiError(500, "The server met an unexpected error.", kind="server_error", code="internal_error")
