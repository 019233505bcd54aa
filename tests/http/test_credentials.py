"""The key in a request's headers."""

import pytest

from quire_http.credentials import key_of

KEY = b"Bearer k"


@pytest.mark.parametrize(
    "headers",
    [
        {b"authorization": KEY},
        {b"authorization": b"bearer  k "},
        {b"x-api-key": b" k "},
        {b"authorization": KEY, b"x-api-key": b"k", b"accept": b"*/*"},
    ],
)
def test_a_key_is_read_as_openai_s_and_as_anthropic_s_clients_send_it(headers):
    assert key_of(headers.items()) == b"k"


@pytest.mark.parametrize(
    "headers",
    [
        [],
        *([(b"authorization", value)] for value in (b"", b"Bearer", b"Bearer ", b"Basic k", b"k")),
        [(b"x-api-key", b" ")],
        [(b"authorization", KEY), (b"authorization", KEY)],
        [(b"x-api-key", b"k"), (b"x-api-key", b"k")],
        [(b"authorization", KEY), (b"x-api-key", b"other")],
        [(b"authorization", b"Basic k"), (b"x-api-key", b"k")],
    ],
)
def test_other_headers_and_headers_that_contradict_are_no_key(headers):
    assert key_of(headers) == b""
