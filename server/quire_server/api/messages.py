"""/v1/messages and /v1/messages/count_tokens: Anthropic's API, by the same steps as a chat completion."""

from __future__ import annotations

import functools

from quire_http.exchange import HttpExchange
from quire_server.api.auth import PRINCIPAL
from quire_server.api.chat_prompt import chat_prompt
from quire_server.api.completions import ChatApi, serve_chat
from quire_server.api.context import ServerContext
from quire_server.api.message_formatter import message_response
from quire_server.api.protocol.messages import CountTokensRequest, parse_messages
from quire_server.api.protocol.validation import validate

_API = ChatApi(
    prefix="msg_",
    respond=message_response,
    fields={"enable_thinking": "thinking", "thinking_token_budget": "thinking"},
)


async def create(server: ServerContext, exchange: HttpExchange) -> None:
    """The handler of /v1/messages."""
    await serve_chat(server, exchange, parse_messages, _API)


async def count_tokens(server: ServerContext, exchange: HttpExchange) -> None:
    """The handler of /v1/messages/count_tokens: the tokens of the prompt that such a message would have."""
    request = await server.read(exchange, functools.partial(validate, CountTokensRequest))
    server.check_model(request.model, exchange.scope[PRINCIPAL])
    call, lane = request.to_call(), f"{exchange.client} (text)"
    async with server.text_gate.enter(exchange.client):
        chat = await chat_prompt(server, call, lane)
        tokens = await server.tokenize(
            chat.text, special=False, limit=server.max_text_tokens, client=lane, param="messages"
        )
    await exchange.json({"input_tokens": len(tokens)})
