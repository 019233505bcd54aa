"""What a request is charged with, however its answer ends."""

import types

import pytest

from quire_gateway.accounting import Account
from quire_gateway.relay import _stream
from quire_gateway.usage import Usage
from quire_http.exchange import ClientGoneError, CutError

CHUNK = b'data: {"usage": {"prompt_tokens": 5, "completion_tokens": 30, "total_tokens": 35}}\n\n'


class Settled:
    """A reservation that says how it ended."""

    as_it = None

    def settle(self, *taken):
        self.as_it = taken

    def settle_whole(self):
        self.as_it = "whole"

    def release(self):
        self.as_it = "nothing"


@pytest.fixture
def account(clock):
    nothing = types.SimpleNamespace(
        **dict.fromkeys(("begun", "ended", "took", "request"), lambda *arguments: None)
    )
    account = Account("/v1/chat/completions", "x", nothing, nothing, clock)
    account.reservation = Settled()
    account.replicas.append("pod")
    return account


def settled(account, error=None):
    account.end(error)
    return account.reservation.as_it


@pytest.mark.parametrize("error", [ClientGoneError(), CutError()])
def test_a_stream_that_breaks_off_takes_all_its_answers_where_each_chunk_has_the_usage_of_one(account, error):
    account.answer_begins(200)
    account.stream, account.prompt_tokens, account.num_events = True, 9, 240
    account.read_usage(CHUNK)
    assert settled(account, error) == (9, 240)


def test_a_stream_that_is_whole_takes_what_it_says(account):
    account.answer_begins(200)
    account.stream, account.prompt_tokens, account.num_events = True, 9, 33
    account.read_usage(CHUNK)
    assert settled(account) == (5, 30)


@pytest.mark.parametrize("at", range(1, len(CHUNK)))
async def test_the_usage_of_a_long_answer_is_found_wherever_its_parts_end(account, at):
    answer = b'{"text": "' + b"x" * 100 + b'", ' + CHUNK
    parts = [answer[: -len(CHUNK) + at], answer[-len(CHUNK) + at :], b""]

    async def nothing(*arguments, **more):
        pass

    async def read():
        return parts.pop(0)

    exchange = types.SimpleNamespace(started=False, headers=[], begin=nothing, part=nothing, end=nothing)
    response = types.SimpleNamespace(status=200, content_type="application/json", raw_headers=[])
    attempt = types.SimpleNamespace(read=read, model=None, response_headers=frozenset())
    await _stream(exchange, attempt, response, account, None, None)
    assert account.usage == Usage(5, 30)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("error", [None, ClientGoneError(), CutError()])
def test_a_request_that_no_replica_was_asked_for_takes_nothing(account, stream, error):
    account.replicas.clear()
    account.stream, account.prompt_tokens = stream, 9
    assert settled(account, error) == "nothing"
