"""How each API of the model servers writes its errors, its streams and its ids of requests.

Which API a request is for is known by its path alone, so that even what is refused before a route is found is
an error in the form that the client's library reads. Knows no request.
"""

from __future__ import annotations

from typing import Any, Protocol

from quire_http.errors import ApiError

Json = dict[str, Any]

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
RESPONSES = "/v1/responses"
#: A kept response, by its id.
RESPONSES_PREFIX = "/v1/responses/"


class Dialect(Protocol):
    """The form of one API."""

    #: The response header, beside `x-request-id`, that has the id of a request; empty for none.
    request_id_header: str
    #: What ends a stream after its last event.
    end_of_stream: bytes

    def error(self, error: ApiError, request_id: str) -> Json:
        """The body of an error."""

    def error_event(self, error: ApiError, request_id: str, num_events: int) -> tuple[str, Json]:
        """The name and the data of an event that ends a stream too early, after so many; the name is empty
        for none.
        """


class OpenAI:
    """Chat completions, completions, and all that is ours."""

    request_id_header = ""
    end_of_stream = b"data: [DONE]\n\n"

    def error(self, error: ApiError, request_id: str) -> Json:
        """An object with `error` alone."""
        return error.body

    def error_event(self, error: ApiError, request_id: str, num_events: int) -> tuple[str, Json]:
        """The same object."""
        return "", error.body


_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
#: Names of fields of the shared pipeline, and what they are called in Anthropic's requests.
_ANTHROPIC_FIELDS = {"thinking_token_budget": "thinking.budget_tokens"}


class Anthropic:
    """Messages. Errors have `param` and `code` as well: no library minds, and programs need them."""

    request_id_header = "request-id"
    end_of_stream = b""

    def error(self, error: ApiError, request_id: str) -> Json:
        """Anthropic's object; its type follows from the status."""
        kind = _KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        param, message = renamed(error, _ANTHROPIC_FIELDS)
        detail = {"type": kind, "message": message, "param": param, "code": error.code}
        return {"type": "error", "error": detail, "request_id": request_id}

    def error_event(self, error: ApiError, request_id: str, num_events: int) -> tuple[str, Json]:
        """The same object, in an event of the name `error`."""
        return "error", self.error(error, request_id)


#: The same for OpenAI's Responses.
_RESPONSES_FIELDS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "enable_thinking": "reasoning.effort",
}


class Responses:
    """OpenAI's Responses: errors as in its other APIs, events with names and numbers."""

    request_id_header = ""
    end_of_stream = b""

    def error(self, error: ApiError, request_id: str) -> Json:
        """OpenAI's object."""
        param, message = renamed(error, _RESPONSES_FIELDS)
        return {"error": {**error.body["error"], "param": param, "message": message}}

    def error_event(self, error: ApiError, request_id: str, num_events: int) -> tuple[str, Json]:
        """An event of the type `error`."""
        param, message = renamed(error, _RESPONSES_FIELDS)
        data = {"type": "error", "code": error.code, "message": message, "param": param}
        return "error", {**data, "sequence_number": num_events}


def renamed(error: ApiError, fields: dict[str, str]) -> tuple[str | None, str]:
    """Field and message of an error, with the API's own name of the field."""
    param, message = error.param, str(error)
    if param is None or (name := fields.get(param)) is None:
        return param, message
    return name, message.replace(f"{param}: ", f"{name}: ", 1)


_OPENAI = OpenAI()
_BY_PATH: dict[str, Dialect] = {
    MESSAGES: Anthropic(),
    COUNT_TOKENS: Anthropic(),
    RESPONSES: Responses(),
}


def dialect_of(path: str) -> Dialect:
    """That of a path; OpenAI's where it is no other API's."""
    return _BY_PATH.get(path, _OPENAI)
