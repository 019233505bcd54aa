"""What a request is charged with, however its answer ends."""

import types

import pytest

from quire_gateway.accounting import Account
from quire_gateway.app import Gateway
from quire_gateway.relay import _stream
from quire_gateway.usage import Usage
from quire_http.exchange import ClientGoneError, CutError, HttpExchange

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


def account_of(path, clock):
    nothing = types.SimpleNamespace(**dict.fromkeys(("begun", "ended", "request"), lambda *arguments: None))
    nothing.took = lambda *arguments: taken.append(arguments)
    account, taken = Account(path, "x", nothing, nothing, clock), []
    account.reservation, account.taken = Settled(), taken
    account.replicas.append("pod")
    return account


@pytest.fixture
def account(clock):
    return account_of("/v1/chat/completions", clock)


def settled(account, error=None):
    account.end(error)
    return account.reservation.as_it


@pytest.mark.parametrize("error", [ClientGoneError(), CutError()])
def test_a_stream_that_breaks_off_takes_all_its_answers_where_each_chunk_has_the_usage_of_one(account, error):
    account.answer_begins(200)
    account.stream, account.prompt_tokens, account.num_events = True, 9, 239
    account.read_events(CHUNK)
    assert settled(account, error) == (9, 240)


def test_a_stream_that_is_whole_takes_what_it_says(account):
    account.answer_begins(200)
    account.stream, account.prompt_tokens, account.num_events = True, 9, 32
    account.read_events(CHUNK)
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


@pytest.mark.parametrize("is_cut", [False, True])
async def test_a_long_answer_whose_client_goes_takes_no_usage_of_the_client_s_own(clock, is_cut):
    account = account_of("/v1/responses", clock)
    fake = b'{"tools": [{"usage": {"input_tokens": 0, "output_tokens": 0}}], "x": "' + b"x" * 600
    parts = [fake, b'", "usage": {"input_tokens": 5, "output_tokens": 30}}', b""]
    num_sent = 0

    async def nothing(*arguments, **more):
        pass

    async def part(data):
        nonlocal num_sent
        num_sent += 1
        if is_cut and num_sent == 2:
            raise ClientGoneError

    async def read():
        return parts.pop(0)

    exchange = types.SimpleNamespace(started=False, headers=[], begin=nothing, part=part, end=nothing)
    response = types.SimpleNamespace(status=200, content_type="application/json", raw_headers=[])
    attempt = types.SimpleNamespace(read=read, model=None, response_headers=frozenset())
    try:
        await _stream(exchange, attempt, response, account, None, None)
    except ClientGoneError as gone:
        assert settled(account, gone) == "whole"
    else:
        assert settled(account) == (5, 30)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("error", [None, ClientGoneError(), CutError()])
def test_a_request_that_no_replica_was_asked_for_takes_nothing(account, stream, error):
    account.replicas.clear()
    account.stream, account.prompt_tokens = stream, 9
    assert settled(account, error) == "nothing"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_a_stream_that_ends_with_the_failure_of_a_replica_takes_what_came_and_not_what_its_events_say(
    path, clock
):
    account = account_of(path, clock)
    account.answer_begins(200)
    account.stream, account.prompt_tokens = True, 9
    account.read_events(b'data: {"message": {"usage": {"input_tokens": 0, "output_tokens": 0}}}\n\n')
    account.read_events(b"data: {}\n\n" * 40 + b'data: {"type": "error"}\n\n')
    assert settled(account) == (9, 42) and not account.taken


def test_a_prompt_that_is_counted_takes_nothing(clock):
    account = account_of("/v1/messages/count_tokens", clock)
    account.answer_begins(200)
    account.generates = False
    account.read_usage(b'{"input_tokens": 5000}')
    assert settled(account) == (0, 0) and not account.taken
    assert account.usage == Usage(5000, 0), "the log has it"


@pytest.mark.parametrize("error", [CutError(), RuntimeError()])
async def test_the_error_event_of_a_stream_that_breaks_in_the_gateway_goes_on_with_its_numbers(error, clock):
    sent = []

    async def send(message):
        sent.append(message.get("body", b""))

    async def answer(exchange, account):
        await exchange.begin(200, [], is_events=True)
        account.read_events(b"data: {}\n\n" * 7)
        raise error

    log = types.SimpleNamespace(request=lambda facts: None)
    metrics = types.SimpleNamespace(begun=lambda: None, ended=lambda *facts: None)
    drain = types.SimpleNamespace(num_requests=0)
    facts = {"tracing": None, "metrics": metrics, "access_log": log, "clock": clock, "drain": drain}
    gateway = types.SimpleNamespace(**facts, _answer=answer)
    exchange = HttpExchange({"path": "/v1/responses", "headers": []}, None, send)
    await exchange.serve(Gateway._relay(gateway, exchange))
    assert b'"sequence_number":7' in b"".join(sent) and drain.num_requests == 0
