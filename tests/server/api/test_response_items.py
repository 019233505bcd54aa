"""The end of a streamed response that fails on the way."""

import json
from types import SimpleNamespace

from quire_http.errors import overloaded
from quire_http.exchange import HttpExchange
from quire_server.api.output_processor import OutputDelta
from quire_server.api.request_context import TokenCounts
from quire_server.api.response_formatter import Header
from quire_server.api.response_items import Asked, item_response


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
