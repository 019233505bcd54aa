"""Errors in the form of each API."""

import pytest

from quire_http.dialects import COUNT_TOKENS, MESSAGES, RESPONSES, dialect_of
from quire_http.errors import ApiError, bad_field, overloaded

FULL = overloaded("queue_full", "No room.", 1)


def test_openai_s_errors_have_one_object_and_no_name():
    dialect = dialect_of("/v1/chat/completions")
    assert dialect.error(FULL, "id") == dialect.error_event(FULL, "id", 3)[1] == FULL.body
    assert dialect.error_event(FULL, "id", 3)[0] == ""
    assert (dialect.end_of_stream, dialect.request_id_header) == (b"data: [DONE]\n\n", "")


@pytest.mark.parametrize("path", [MESSAGES, COUNT_TOKENS])
@pytest.mark.parametrize(
    ("status", "kind"), [(400, "invalid_request_error"), (405, "invalid_request_error"), (502, "api_error")]
)
def test_anthropic_s_errors_have_a_type_by_their_status(path, status, kind):
    dialect = dialect_of(path)
    body = dialect.error(ApiError(status, "No.", param="a", code="b"), "id")
    detail = {"type": kind, "message": "No.", "param": "a", "code": "b"}
    assert body == {"type": "error", "error": detail, "request_id": "id"}
    name, data = dialect.error_event(FULL, "id", 3)
    assert (name, data["error"]["type"], dialect.end_of_stream) == ("error", "overloaded_error", b"")


def test_an_error_of_a_response_is_a_numbered_event():
    dialect = dialect_of(RESPONSES)
    assert dialect.error(FULL, "id") == FULL.body
    data = {"type": "error", "code": "queue_full", "message": "No room.", "param": None}
    assert dialect.error_event(FULL, "id", 3) == ("error", {**data, "sequence_number": 3})


@pytest.mark.parametrize(
    ("path", "ours", "theirs"),
    [
        (MESSAGES, "thinking_token_budget", "thinking.budget_tokens"),
        (RESPONSES, "messages", "input"),
        (RESPONSES, "max_tokens", "max_output_tokens"),
    ],
)
def test_a_field_is_named_as_the_request_has_it(path, ours, theirs):
    error = dialect_of(path).error(bad_field(ours, "is too long"), "id")["error"]
    assert (error["param"], error["message"]) == (theirs, f"{theirs}: is too long")
