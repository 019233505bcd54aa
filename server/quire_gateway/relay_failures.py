"""Why a request got no answer, and what its client gets instead.

Beside the failures of an attempt (``attempt.AttemptError``) there are those that the relay finds without
asking a replica, or in its answer. Knows no replicas and sends nothing.
"""

from __future__ import annotations

import aiohttp
import orjson

from quire_gateway.activator import ADAPTER_NOT_READY, HoldError
from quire_gateway.attempt import AttemptError
from quire_gateway.dispatch import Destination, kill_switch_refusal
from quire_gateway.openai.calls import COMPLETION_PATHS
from quire_gateway.response_cache import Headers
from quire_http.errors import ApiError, bad_field, overloaded

RETRY_AFTER_SECONDS = 1
_ADAPTER_RETRY_AFTER_SECONDS = 5
_NOT_KEPT = "the replica that kept this response is gone; send the whole conversation as input"


class Refusal(AttemptError):
    """A replica's own answer that another one may do better; kept, because it may be the last."""

    def __init__(self, reason: str, response: aiohttp.ClientResponse, headers: Headers, body: bytes) -> None:
        super().__init__(reason, f"HTTP {response.status}")
        self.response = response
        self.headers = headers
        self.body = body


class OtherApiError(AttemptError):
    """An external backend is asked by OpenAI's completions alone."""

    def __init__(self, path: str) -> None:
        paths = " and ".join(COMPLETION_PATHS)
        super().__init__(
            "other_api", f"This model is answered by an external backend, which has no {path}: use {paths}."
        )


class NotKeptError(AttemptError):
    """The replica that kept what a response goes on with is gone."""

    def __init__(self) -> None:
        super().__init__("not_kept", _NOT_KEPT)


class NoAdapterError(AttemptError):
    """No replica has the LoRA adapter that the request is for."""

    def __init__(self, adapter: str) -> None:
        message = (
            f"The adapter {adapter!r} is not ready on any replica of its model; ask again later. "
            "Its LLMDeployment's status.adapters says why."
        )
        super().__init__(ADAPTER_NOT_READY, message)


class SwitchedOffError(AttemptError):
    """The kill switch is on, and the fallbacks of this destination answer alone."""

    def __init__(self, destination: Destination) -> None:
        assert destination.kill_switch is not None
        super().__init__("kill_switch", destination.kill_switch.message)
        self.fallbacks = destination.fallbacks


def code_of(body: bytes) -> str:
    """The code of an error in OpenAI's shape, "" of anything else."""
    try:
        return str(orjson.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return ""


def refusal_of(failure: AttemptError) -> ApiError | None:
    """The error of a failure after which nothing was asked, or that is for lack of room."""
    if isinstance(failure, HoldError):
        return overloaded(failure.reason, str(failure), failure.retry_after)
    if isinstance(failure, SwitchedOffError):
        return kill_switch_refusal(str(failure))
    if isinstance(failure, OtherApiError):
        return ApiError(400, str(failure), code="api_not_supported")
    if isinstance(failure, NotKeptError):
        return bad_field("previous_response_id", str(failure), code="previous_response_not_found")
    if isinstance(failure, NoAdapterError):
        return overloaded(failure.reason, str(failure), _ADAPTER_RETRY_AFTER_SECONDS)
    if failure.reason == "rate_limited":
        return overloaded("rate_limited", "The backend that answers has no room.", RETRY_AFTER_SECONDS)
    return None


def error_of(failure: AttemptError) -> ApiError:
    """The error of a replica that was asked and did not answer to its end."""
    if failure.reason in ("timeout", "idle"):
        message = "The replica that answers did not go on in time."
        return ApiError(504, message, kind="server_error", code="replica_timeout")
    if failure.reason == "unauthorized":
        message = "The replica does not accept requests of this gateway."
        return ApiError(502, message, kind="server_error", code="gateway_refused")
    message = "The replica that answers was lost."
    return ApiError(502, message, kind="server_error", code="replica_lost")
