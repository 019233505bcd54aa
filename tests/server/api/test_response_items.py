"""The end of a streamed response that fails on the way, and what is kept of a request until its end."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from quire_http.body_memory import BodyMemory
from quire_http.errors import ApiError, overloaded
from quire_http.exchange import MAX_BODY_BYTES, HttpExchange, to_json
from quire_server.api import completions, openai_responses
from quire_server.api.output_processor import OutputDelta
from quire_server.api.protocol.requests import MAX_MESSAGES
from quire_server.api.request_context import TokenCounts
from quire_server.api.response_formatter import Header
from quire_server.api.response_items import Asked, item_response
from quire_server.api.response_store import ResponseStore, StoredResponse
from quire_server.model_dir.generation_config import SamplingDefaults


async def test_a_response_that_fails_on_the_way_ends_as_a_failed_one_with_what_it_had():
    sent = []

    async def send(message):
        sent.append(message.get("body", b""))

    exchange = HttpExchange({"headers": [], "path": "/v1/responses"}, None, send)
    request = SimpleNamespace(exchange=exchange, counts=TokenCounts(), ends_with_usage=False)
    generation = SimpleNamespace(stream=True)
    response = item_response(Asked(), request, Header("resp_1", 5, "m"), generation, [3])
    await response.add(OutputDelta(0, "So ", (), 1, 0, None))
    await exchange.error(overloaded("engine_unavailable", "The engine is gone.", 1))
    events = [json.loads(part.split(b"data: ")[1]) for part in b"".join(sent).split(b"\n\n") if part]
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.failed"
    body = events[-1]["response"]
    assert (body["status"], body["error"]["code"]) == ("failed", "engine_unavailable")
    assert body["output"][0]["content"][0]["text"] == "So " and body["output"][0]["status"] == "incomplete"


BODY = {"model": "m", "input": "And?", "previous_response_id": "resp_1"}


@pytest.fixture
def parsed(monkeypatch):
    """Parses a body after this conversation; the API with what it keeps."""

    async def parsed(conversation, **fields):
        apis = []

        async def serve(server, exchange, parse, api):
            parse({**BODY, **fields}, SamplingDefaults(), 10)
            apis.append(api)

        monkeypatch.setattr(openai_responses, "serve_chat", serve)
        store = ResponseStore()
        store.put("", "resp_1", StoredResponse(b"{}", to_json(conversation)))
        exchange = SimpleNamespace(client="", scope={"headers": []})
        await openai_responses.create(SimpleNamespace(responses=store), exchange)
        return apis[0]

    return parsed


def said(text):
    return {"role": "user", "content": text}


@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize("earlier", [[said("x" * MAX_BODY_BYTES)], [said("x")] * MAX_MESSAGES])
async def test_a_conversation_goes_on_as_far_as_one_that_is_sent_may(parsed, earlier, store):
    await parsed([said("x" * (MAX_BODY_BYTES // 2))], store=store)
    with pytest.raises(ApiError, match="previous_response_id: .* begin another one") as refused:
        await parsed(earlier, store=store)
    assert refused.value.status == 400


async def test_all_that_is_kept_of_a_request_counts_with_its_body(parsed):
    metadata, long = {"a": "x" * 512}, "x" * 10_000
    tool = {"type": "function", "name": "f", "description": long}
    api = await parsed([said(long)], metadata=metadata, tools=[tool], store=False)
    assert api.num_kept_bytes() > 10_512
    api = await parsed([said(long)], metadata=metadata, tools=[tool])
    assert api.num_kept_bytes() > 20_512

    async def receive():
        return {"type": "http.request", "body": b"{}"}

    exchange = HttpExchange({"headers": [], "path": "/"}, receive, None, BodyMemory(20_000 + (64 << 10)))
    await exchange.body(10)
    exchange.shrink_body(0)
    call = SimpleNamespace(generation=None)
    request = SimpleNamespace(exchange=exchange, server=None)
    api = replace(api, num_kept_bytes=lambda: 100_000)
    with pytest.raises(ApiError, match="memory"):
        await completions._answer_chat(api, request, call)
