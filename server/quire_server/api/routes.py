"""The routes of the API, with what each takes and answers for /openapi.json.

A route returns the handler of its request (see `ExchangeResponse`): the handler admits the request before it
reads the body, so FastAPI must not read it. Handlers of completions and of /health are in their own modules.
"""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Match

from quire_http.errors import ApiError, bad_field
from quire_http.exchange import HttpExchange
from quire_server import __version__
from quire_server.api import adapters, completions, messages, openai_responses
from quire_server.api.context import ServerContext
from quire_server.api.exchange_response import ExchangeResponse
from quire_server.api.health import health
from quire_server.api.input_items import DEFAULT_ITEMS, MAX_ITEMS, ORDERS
from quire_server.api.protocol import message_responses, openai_response_bodies, responses
from quire_server.api.protocol.messages import CountTokensRequest, MessagesRequest
from quire_server.api.protocol.openai_responses import ResponsesRequest
from quire_server.api.protocol.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadAdapterRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from quire_server.api.protocol.validation import validate

#: What only a server of one ``--task`` answers.
GENERATION_PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/responses",
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/input_items",
        "/v1/responses/{response_id}/cancel",
        "/reset_prefix_cache",
    }
)
POOLING_PATHS = frozenset({"/v1/embeddings", "/pooling", "/v1/rerank", "/v1/score"})
COMMON_REQUESTS: tuple[type[BaseModel], ...] = (TokenizeRequest, DetokenizeRequest)
REQUESTS: tuple[type[BaseModel], ...] = (
    ChatCompletionRequest,
    CompletionRequest,
    MessagesRequest,
    CountTokensRequest,
    ResponsesRequest,
    LoadAdapterRequest,
    UnloadAdapterRequest,
    *COMMON_REQUESTS,
)
COMMON_RESPONSES: tuple[type[BaseModel], ...] = (
    responses.Models,
    responses.Tokens,
    responses.Text,
    responses.Empty,
    responses.Health,
    responses.Version,
    responses.Error,
)
RESPONSES: tuple[type[BaseModel], ...] = (
    responses.ChatCompletion,
    responses.ChatCompletionChunk,
    responses.Completion,
    responses.CompletionChunk,
    message_responses.Message,
    *message_responses.MESSAGE_EVENTS,
    message_responses.MessageTokens,
    message_responses.MessagesError,
    openai_response_bodies.ResponseBody,
    *openai_response_bodies.RESPONSE_EVENTS,
    openai_response_bodies.DeletedResponse,
    openai_response_bodies.InputItemList,
    *COMMON_RESPONSES,
)
ERRORS = {
    400: "A field is wrong: `param` names it.",
    401: "No valid API key.",
    403: "This key may not: the `code` is the reason.",
    404: "There is no such model, or no such path.",
    405: "The path is for another method: `Allow` names it.",
    408: "The body did not arrive in time.",
    413: "The body is too long.",
    429: "This key's own limit: `rate_limit_exceeded`.",
    431: "The headers are too long.",
    500: "An error of the server's.",
    503: "Not now: the `code` is the reason, `Retry-After` says when.",
}
_HEADERS = {
    200: ("x-request-id", "x-quire-degraded"),
    429: ("x-request-id", "retry-after"),
    503: ("x-request-id", "retry-after", "x-quire-degraded"),
}
_ABOUT_HEADERS = {
    "x-request-id": "The request's own, or a new one.",
    "x-quire-degraded": "What was done to answer at all: `deadline`, `halved_max_tokens`, `out_of_memory`.",
    "retry-after": "Seconds.",
}
_READING = (401, 500, 503)
POSTING = (400, 401, 404, 408, 413, 500, 503)
_SWAGGER_UI = {  # the package's files by name, with their types
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon-32x32.png": "image/png",
}
_ROOT_PAGE = b"""<!doctype html>
<title>Quire</title>
<h1>Quire</h1>
<ul>
<li><a href="docs">API documentation</a> (<a href="openapi.json">OpenAPI</a>)
<li><a href="v1/models">Models</a>
<li><a href="health">Health</a>
<li><a href="metrics">Metrics</a>
<li><a href="version">Version</a>
</ul>
"""


class _HandlerRoute(APIRoute):
    """A route whose function takes the request alone: there is nothing for FastAPI to read or to resolve."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The function itself."""
        return self.endpoint


def new_router() -> APIRouter:
    """A router of such routes."""
    return APIRouter(route_class=_HandlerRoute)


router = new_router()


def answers(
    model: type[BaseModel] | None,
    *errors: int,
    chunk: type[BaseModel] | None = None,
    events: Sequence[type[BaseModel]] = (),
    error: type[BaseModel] = responses.Error,
) -> dict[int | str, dict[str, Any]]:
    """The responses of a route: by reference, for FastAPI would build validators that no response passes.
    ``chunk``: of OpenAI's streams; ``events``: of those that name their events.
    """
    content = {"application/json": {"schema": _ref(model) if model else {"type": "object"}}}
    if chunk is not None:
        content["text/event-stream"] = {"itemSchema": _event(chunk, error, has_end=True)}
    if events:
        content["text/event-stream"] = {"itemSchema": {"anyOf": [_event(one, error) for one in events]}}
    answers: dict[int | str, dict[str, Any]] = {
        200: {"description": "The answer.", "headers": _headers(200), "content": content}
    }
    for status in sorted(errors):
        body = {"application/json": {"schema": _ref(error)}}
        answers[status] = {"description": ERRORS[status], "headers": _headers(status), "content": body}
    return answers


def _event(chunk: type[BaseModel], error: type[BaseModel], *, has_end: bool = False) -> dict[str, Any]:
    """An event of a stream: OpenAPI 3.2's `itemSchema`, which FastAPI writes into its 3.1 document too."""
    content = {"anyOf": [_ref(chunk), _ref(error)]}
    encoded = {"type": "string", "contentMediaType": "application/json", "contentSchema": content}
    data = {"anyOf": [{"const": "[DONE]"}, encoded]} if has_end else encoded
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _ref(model: type[BaseModel]) -> dict[str, Any]:
    """A reference to a model's schema, which `openapi.document` adds."""
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def _headers(status: int) -> dict[str, Any]:
    names = _HEADERS.get(status, ("x-request-id",))
    return {name: {"schema": {"type": "string"}, "description": _ABOUT_HEADERS[name]} for name in names}


def body(model: type[BaseModel]) -> dict[str, Any]:
    """The request body in the document."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _ref(model)}}}}


def _parameter(
    name: str, where: str, schema: dict[str, Any], about: str, *, required: bool
) -> dict[str, Any]:
    described = {"name": name, "in": where, "required": required, "schema": schema, "description": about}
    return {"parameters": [described]}


_RESPONSE_ID = _parameter("response_id", "path", {"type": "string"}, "The id of a response.", required=True)
_INPUT_ITEMS = {
    "parameters": [
        *_RESPONSE_ID["parameters"],
        *_parameter(
            "limit",
            "query",
            {"type": "integer", "minimum": 1, "maximum": MAX_ITEMS, "default": DEFAULT_ITEMS},
            "How many items.",
            required=False,
        )["parameters"],
        *_parameter(
            "order",
            "query",
            {"enum": list(ORDERS), "default": ORDERS[0]},
            "desc: the latest first.",
            required=False,
        )["parameters"],
        *_parameter("after", "query", {"type": "string"}, "The id of the item before them.", required=False)[
            "parameters"
        ],
    ]
}


@router.post(
    "/v1/chat/completions",
    operation_id="chat",
    summary="Answer a conversation.",
    responses=answers(responses.ChatCompletion, *POSTING, 403, 429, chunk=responses.ChatCompletionChunk),
    openapi_extra=body(ChatCompletionRequest),
)
async def chat(request: Request) -> Response:
    """OpenAI's chat completions."""
    return ExchangeResponse(completions.chat)


@router.post(
    "/v1/completions",
    operation_id="complete",
    summary="Go on with a text.",
    responses=answers(responses.Completion, *POSTING, 403, 429, chunk=responses.CompletionChunk),
    openapi_extra=body(CompletionRequest),
)
async def complete(request: Request) -> Response:
    """OpenAI's completions."""
    return ExchangeResponse(completions.complete)


@router.post(
    "/v1/messages",
    operation_id="createMessage",
    summary="Answer a conversation, as Anthropic's API.",
    responses=answers(
        message_responses.Message,
        *POSTING,
        403,
        429,
        events=message_responses.MESSAGE_EVENTS,
        error=message_responses.MessagesError,
    ),
    openapi_extra=body(MessagesRequest),
)
async def create_message(request: Request) -> Response:
    """Anthropic's messages."""
    return ExchangeResponse(messages.create)


@router.post(
    "/v1/messages/count_tokens",
    operation_id="countMessageTokens",
    summary="The tokens of a conversation's prompt.",
    responses=answers(message_responses.MessageTokens, *POSTING, error=message_responses.MessagesError),
    openapi_extra=body(CountTokensRequest),
)
async def count_message_tokens(request: Request) -> Response:
    """Anthropic's count."""
    return ExchangeResponse(messages.count_tokens)


@router.post(
    "/v1/responses",
    operation_id="createResponse",
    summary="Answer a conversation, as OpenAI's Responses.",
    responses=answers(
        openai_response_bodies.ResponseBody,
        *POSTING,
        403,
        429,
        events=openai_response_bodies.RESPONSE_EVENTS,
    ),
    openapi_extra=body(ResponsesRequest),
)
async def create_response(request: Request) -> Response:
    """OpenAI's responses."""
    return ExchangeResponse(openai_responses.create)


@router.get(
    "/v1/responses/{response_id}",
    operation_id="response",
    summary="A response that is kept.",
    responses=answers(openai_response_bodies.ResponseBody, *_READING, 404),
    openapi_extra=_RESPONSE_ID,
)
async def response(request: Request) -> Response:
    """One response."""
    return ExchangeResponse(openai_responses.read)


@router.delete(
    "/v1/responses/{response_id}",
    operation_id="deleteResponse",
    summary="Keep a response no longer.",
    responses=answers(openai_response_bodies.DeletedResponse, *_READING, 404),
    openapi_extra=_RESPONSE_ID,
)
async def delete_response(request: Request) -> Response:
    """Drop one response."""
    return ExchangeResponse(openai_responses.delete)


@router.get(
    "/v1/responses/{response_id}/input_items",
    operation_id="inputItems",
    summary="What a kept response was asked with.",
    responses=answers(openai_response_bodies.InputItemList, *_READING, 400, 404),
    openapi_extra=_INPUT_ITEMS,
)
async def response_input_items(request: Request) -> Response:
    """The items of one response's input, a page of them."""
    return ExchangeResponse(openai_responses.list_input)


@router.post(
    "/v1/responses/{response_id}/cancel",
    operation_id="cancelResponse",
    summary="Refused: a response is kept when it has ended.",
    responses=answers(None, *_READING, 400, 404),
    openapi_extra=_RESPONSE_ID,
)
async def cancel_response(request: Request) -> Response:
    """Nothing runs in the background."""
    return ExchangeResponse(openai_responses.cancel)


@router.get(
    "/v1/models",
    operation_id="models",
    summary="The models that are served.",
    responses=answers(responses.Models, *_READING),
)
async def models(request: Request) -> Response:
    """All models."""
    return ExchangeResponse(_models)


@router.get(
    "/v1/models/{model:path}",
    operation_id="model",
    summary="One of them.",
    responses=answers(responses.Model, *_READING, 404),
    openapi_extra=_parameter("model", "path", {"type": "string"}, "A name from /v1/models.", required=True),
)
async def model(request: Request) -> Response:
    """One model."""
    return ExchangeResponse(_models)


@router.post(
    "/tokenize",
    operation_id="tokenize",
    summary="The tokens of a text or of a conversation.",
    responses=answers(responses.Tokens, *POSTING),
    openapi_extra=body(TokenizeRequest),
)
async def tokenize(request: Request) -> Response:
    """A prompt, or the messages of a chat, as the model sees it."""
    return ExchangeResponse(_tokenize)


@router.post(
    "/detokenize",
    operation_id="detokenize",
    summary="The text of tokens.",
    responses=answers(responses.Text, *POSTING),
    openapi_extra=body(DetokenizeRequest),
)
async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens included."""
    return ExchangeResponse(_detokenize)


@router.post(
    "/reset_prefix_cache",
    operation_id="resetPrefixCache",
    summary="Forget every cached prefix; needs an admin's key.",
    responses=answers(responses.Empty, *_READING, 403),
)
async def reset_prefix_cache(request: Request) -> Response:
    """No later request finds what was computed before, in any tier."""
    return ExchangeResponse(_reset_prefix_cache)


@router.post(
    "/v1/load_lora_adapter",
    operation_id="loadAdapter",
    summary="Load a LoRA adapter; needs an admin's key.",
    responses=answers(responses.Empty, *POSTING, 403),
    openapi_extra=body(LoadAdapterRequest),
)
async def load_adapter(request: Request) -> Response:
    """From --adapters-dir; its name is a model's afterwards."""
    return ExchangeResponse(adapters.load)


@router.post(
    "/v1/unload_lora_adapter",
    operation_id="unloadAdapter",
    summary="Drop a LoRA adapter; needs an admin's key.",
    responses=answers(responses.Empty, *POSTING, 403),
    openapi_extra=body(UnloadAdapterRequest),
)
async def unload_adapter(request: Request) -> Response:
    """Its requests finish; new ones get a 404."""
    return ExchangeResponse(adapters.unload)


@router.get(
    "/health",
    operation_id="health",
    summary="The checks of the server, with their numbers.",
    responses=answers(responses.Health, 400, 401, 500)
    | {
        503: {
            "description": "Requests cannot be answered.",
            "content": {"application/json": {"schema": _ref(responses.Health)}},
        }
    },
    openapi_extra={"security": [{}, {"key": []}]}
    | _parameter(
        "deep",
        "query",
        {"type": "boolean"},
        "Whether to run a completion now; this needs a key.",
        required=False,
    ),
)
async def health_checks(request: Request) -> Response:
    """For people, dashboards and load balancers."""
    return ExchangeResponse(health)


@router.get(
    "/metrics",
    operation_id="metrics",
    summary="Prometheus metrics.",
    responses=answers(None, 500) | {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    response_class=Response,
    openapi_extra={"security": [{}]},
)
async def metrics(request: Request) -> Response:
    """In the format that the Accept header asks for."""
    return ExchangeResponse(_metrics)


@router.get(
    "/version",
    operation_id="version",
    summary="The server's version.",
    responses=answers(responses.Version, *_READING),
)
async def version(request: Request) -> Response:
    """The version of the package."""
    return ExchangeResponse(_version)


@router.get(
    "/openapi.json",
    operation_id="openapi",
    summary="This document.",
    responses=answers(None, *_READING),
)
async def openapi_document(request: Request) -> Response:
    """The document of this very server, as far as its model is known."""

    async def handler(context: ServerContext, exchange: HttpExchange) -> None:
        _check_docs(context, exchange)
        await exchange.json(request.app.openapi())

    return ExchangeResponse(handler)


@router.get("/", include_in_schema=False)
async def root(request: Request) -> Response:
    """Links for people."""

    async def handler(context: ServerContext, exchange: HttpExchange) -> None:
        await exchange.whole(200, _ROOT_PAGE, "text/html; charset=utf-8")

    return ExchangeResponse(handler)


@router.get("/docs", include_in_schema=False)
@router.get("/docs/{name}", include_in_schema=False)
async def docs(request: Request) -> Response:
    """Swagger UI from the image itself: the page names no other host."""

    async def handler(context: ServerContext, exchange: HttpExchange) -> None:
        _check_docs(context, exchange)
        name = request.path_params.get("name")
        if name is None:
            await exchange.whole(200, _docs_page(), "text/html; charset=utf-8")
        elif name in _SWAGGER_UI:
            file = importlib.resources.files("fastapi_swagger") / "resources" / name
            await exchange.whole(200, file.read_bytes(), _SWAGGER_UI[name])
        else:
            raise not_found(exchange)

    return ExchangeResponse(handler)


@functools.cache
def _docs_page() -> bytes:
    page = get_swagger_ui_html(
        openapi_url="openapi.json",
        title="Quire",
        swagger_js_url="docs/swagger-ui-bundle.js",
        swagger_css_url="docs/swagger-ui.css",
        swagger_favicon_url="docs/favicon-32x32.png",
        swagger_ui_parameters={"validatorUrl": None},  # else the document is sent to validator.swagger.io
    )
    return bytes(page.body)


def _check_docs(context: ServerContext, exchange: HttpExchange) -> None:
    if not context.with_docs:
        raise not_found(exchange)


def not_found(exchange: HttpExchange) -> ApiError:
    """A 404 that names the path."""
    return ApiError(404, f"There is no {exchange.scope['path']}.", code="not_found")


async def refuse(request: Request, error: Exception) -> Response:
    """The response to a path or a method that no route has."""

    async def handler(context: ServerContext, exchange: HttpExchange) -> None:
        assert isinstance(error, HTTPException)
        _refuse_other_task(context, exchange.scope["path"])
        if error.status_code != 405 or error.headers is None:
            raise not_found(exchange)
        # A path may have a route for each of its methods, of which the error knows one.
        found = {error.headers["Allow"]}
        for route in router.routes:
            if isinstance(route, APIRoute) and route.matches(request.scope)[0] is not Match.NONE:
                found |= route.methods or set()
        methods, path = ", ".join(sorted(found, reverse=True)), exchange.scope["path"]
        allowed = methods.replace("GET", "GET, HEAD")
        raise ApiError(405, f"{path} is for {methods}.", headers=(("allow", allowed),))

    return ExchangeResponse(handler)


def _refuse_other_task(context: ServerContext, path: str) -> None:
    """Raise a 404 that names the task of the server where a path is of the other one."""
    other, paths = ("embed", POOLING_PATHS) if context.task == "generate" else ("generate", GENERATION_PATHS)
    # A response's id is the last part of its path.
    if path in paths or ("/v1/responses" in paths and path.startswith("/v1/responses/")):
        raise ApiError(
            404,
            f"There is no {path}: this server runs with --task {context.task}, and the path needs one that "
            f"runs with --task {other}.",
            code="not_found",
        )


async def _models(context: ServerContext, exchange: HttpExchange) -> None:
    max_model_len = context.engine.info.max_model_len if context.engine.connected else None
    cards = {
        name: responses.Model(id=name, created=context.created, max_model_len=max_model_len)
        for name in context.served_names
    }
    for name in context.adapter_names:
        root = context.served_names[0]
        cards[name] = responses.Model(
            id=name, created=context.created, max_model_len=max_model_len, parent=root
        )
    wanted = exchange.scope["path"].removeprefix("/v1/models").strip("/")
    if not wanted:
        await exchange.json(responses.Models(data=list(cards.values())).model_dump())
        return
    context.check_model(wanted)
    await exchange.json(cards[wanted].model_dump())


async def _tokenize(context: ServerContext, exchange: HttpExchange) -> None:
    request = await context.read(exchange, functools.partial(validate, TokenizeRequest))
    _check_model(context, request.model)
    request.check()
    most, lane = context.max_text_tokens, _lane(exchange)
    async with context.text_gate.enter(exchange.client):
        if request.prompt is None:
            messages = [
                one.to_template(f"messages[{index}]") for index, one in enumerate(request.messages or ())
            ]
            tokens = await context.tokenize_chat(messages, limit=most, client=lane)
        else:
            tokens = await context.tokenize(
                request.prompt, special=request.add_special_tokens, limit=most, client=lane
            )
    limit = context.engine.info.max_model_len if context.engine.connected else None
    await exchange.json({"count": len(tokens), "max_model_len": limit, "tokens": tokens})


async def _detokenize(context: ServerContext, exchange: HttpExchange) -> None:
    most = context.max_text_tokens
    request = await context.read(
        exchange, lambda body: validate(DetokenizeRequest, body, context.tokenizer.vocab_size), most
    )
    _check_model(context, request.model)
    if len(request.tokens) > most:
        raise bad_field(
            "tokens", f"are {len(request.tokens)}, and at most {most} are taken: send them in parts"
        )
    async with context.text_gate.enter(exchange.client):
        text = await context.detokenize(request.tokens, skip_special_tokens=False, client=_lane(exchange))
    await exchange.json({"prompt": text})


def _lane(exchange: HttpExchange) -> str:
    """The place in which work that is not admitted takes turns: beside the same client's completions."""
    return f"{exchange.client} (text)"


def _check_model(context: ServerContext, model: str | None) -> None:
    if model:
        context.check_model(model)


async def _version(context: ServerContext, exchange: HttpExchange) -> None:
    await exchange.json({"version": __version__})


async def _reset_prefix_cache(context: ServerContext, exchange: HttpExchange) -> None:
    context.engine.reset_prefix_cache()
    await exchange.json({})


async def _metrics(context: ServerContext, exchange: HttpExchange) -> None:
    accept = [value.decode("latin-1") for name, value in exchange.scope["headers"] if name == b"accept"]
    text, content_type = context.metrics.exposition(", ".join(accept))
    await exchange.whole(200, text, content_type)
