"""The errors of an HTTP API: OpenAI's error body, with a status that says whose fault it is.

Raised anywhere in a server and turned into a response at the boundary of a request.
"""

from __future__ import annotations


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
        self.param = param
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
    """The response for an error; an unexpected one is a 500 without details."""
    if isinstance(error, ApiError):
        return error
    return ApiError(500, "The server met an unexpected error.", kind="server_error", code="internal_error")
