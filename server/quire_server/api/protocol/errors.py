"""The responses for errors of the layers below the API: the engine's and those of a request's texts."""

from __future__ import annotations

from quire_http import errors
from quire_http.errors import ApiError, overloaded
from quire_server.engine.client import (
    AdapterGoneError,
    EngineGoneError,
    RequestImpossibleError,
    RequestLostError,
    StepOutOfMemoryError,
)
from quire_server.errors import PromptTooLongError, RequestError

ENGINE_UNAVAILABLE = "engine_unavailable"
OUT_OF_MEMORY = "out_of_memory"  # given up for the sake of the others in its step
_RETRY_AFTER_LOADING = 5


def from_exception(error: Exception) -> ApiError:
    """The response for an error of any layer; an unexpected one is a 500 without details."""
    if isinstance(error, PromptTooLongError):
        return ApiError(400, str(error), param=error.param, code="context_length_exceeded")
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.param)
    if isinstance(error, EngineGoneError):
        return overloaded(ENGINE_UNAVAILABLE, str(error), _RETRY_AFTER_LOADING)
    if isinstance(error, StepOutOfMemoryError):
        return overloaded(OUT_OF_MEMORY, str(error), _RETRY_AFTER_LOADING)
    if isinstance(error, AdapterGoneError):
        return ApiError(404, str(error), param="model", code="model_not_found")
    if isinstance(error, RequestImpossibleError):
        return ApiError(400, str(error), code="no_token_possible")
    if isinstance(error, RequestLostError):
        return ApiError(500, str(error), kind="server_error", code="request_failed")
    return errors.from_exception(error)
