"""/v1/responses: OpenAI's API of items, by the steps of a chat completion, and what it keeps."""

from __future__ import annotations

import re
from functools import partial

from quire_http.dialects import RESPONSES_PREFIX
from quire_http.errors import ApiError, bad_field
from quire_http.exchange import MAX_BODY_BYTES, HttpExchange, to_json
from quire_server.api.completions import ChatApi, serve_chat
from quire_server.api.context import ServerContext
from quire_server.api.input_items import Page, input_items
from quire_server.api.protocol.openai_responses import parse_responses
from quire_server.api.protocol.requests import MAX_MESSAGES, ChatCall
from quire_server.api.protocol.validation import Json
from quire_server.api.response_items import Asked, encoded, item_response
from quire_server.model_dir.generation_config import SamplingDefaults

#: Of a gateway: what an id has to begin with, so that later requests about it come here.
REPLICA_HEADER = b"x-quire-replica"
_HINT = re.compile(rb"[0-9a-f]{1,32}")


async def create(server: ServerContext, exchange: HttpExchange) -> None:
    """The handler of /v1/responses."""
    asked, client = Asked(), exchange.client

    def parse(body: Json, defaults: SamplingDefaults, vocab_size: int) -> ChatCall:
        request = parse_responses(body, vocab_size)
        find = partial(server.responses.conversation, client)
        call, conversation = request.to_call(defaults, vocab_size, find)
        before, after = request.echo(defaults)
        asked.before, asked.after = to_json(before), to_json(after)
        if request.previous_response_id or request.store:
            written = encoded(conversation)
            if request.previous_response_id:
                _check_length(len(written), len(conversation))
            if request.store:
                asked.is_kept, asked.conversation = True, written
        return call

    hint = next((value for name, value in exchange.scope["headers"] if name == REPLICA_HEADER), b"")
    api = ChatApi(
        prefix=f"resp_{hint.decode()}_" if _HINT.fullmatch(hint) else "resp_",
        respond=partial(item_response, asked),
        fields={"enable_thinking": "reasoning.effort"},
        num_kept_bytes=lambda: asked.num_bytes,
    )
    await serve_chat(server, exchange, parse, api)


async def read(server: ServerContext, exchange: HttpExchange) -> None:
    """The handler of GET for a kept response."""
    client, response_id = _named(exchange)
    if (found := server.responses.get(client, response_id)) is None:
        raise _not_kept(response_id)
    await exchange.whole(200, found.body, "application/json")


async def delete(server: ServerContext, exchange: HttpExchange) -> None:
    """The handler of DELETE for a kept response."""
    client, response_id = _named(exchange)
    if not server.responses.delete(client, response_id):
        raise _not_kept(response_id)
    await exchange.json({"id": response_id, "object": "response", "deleted": True})


async def list_input(server: ServerContext, exchange: HttpExchange) -> None:
    """The handler of GET for the items that a kept response was asked with."""
    page = Page.parse(exchange.scope["query_string"])
    client, response_id = _named(exchange, "/input_items")
    if (conversation := server.responses.conversation(client, response_id)) is None:
        raise _not_kept(response_id)
    await exchange.json(page.of(input_items(response_id, conversation)))


async def cancel(server: ServerContext, exchange: HttpExchange) -> None:
    """The handler of a request to cancel a kept response, which has ended before it is kept."""
    client, response_id = _named(exchange, "/cancel")
    if server.responses.get(client, response_id) is None:
        raise _not_kept(response_id)
    raise bad_field(
        "response_id",
        "is of a response without background, which cannot be cancelled: close the connection of a request "
        "while it is answered",
    )


def _check_length(num_bytes: int, num_messages: int) -> None:
    """Raise ApiError where a conversation that goes on is longer than one that is sent may be."""
    if num_bytes > MAX_BODY_BYTES or num_messages > MAX_MESSAGES:
        raise bad_field(
            "previous_response_id",
            f"the conversation has {num_messages} messages and {num_bytes} bytes with this input, and may "
            f"have {MAX_MESSAGES} and {MAX_BODY_BYTES}: begin another one with what is needed of it",
        )


def _named(exchange: HttpExchange, what: str = "") -> tuple[str, str]:
    """The client, and the id in the path, which ends with ``what``."""
    return exchange.client, exchange.scope["path"].removeprefix(RESPONSES_PREFIX).removesuffix(what)


def _not_kept(response_id: str) -> ApiError:
    return ApiError(
        404,
        f"The response {response_id[:256]!r} is not kept here (any more): memory for responses is limited.",
        param="response_id",
        code="response_not_found",
    )
