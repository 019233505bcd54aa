"""The OpenAPI document of the API: every route with what it takes, what it answers and how it refuses.

Served at /openapi.json (`public`), and the source of docs/api.md. Made of the parsers' own bounds, so that it
cannot promise what they refuse; contract tests compare the two field by field. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire_server import __version__
from quire_server.api import openapi_requests
from quire_server.api.json_schema import Schema
from quire_server.api.openapi_responses import components, ref
from quire_server.api.sampling_defaults import SamplingDefaults

ERRORS = {
    "400": "A field is wrong: `param` names it.",
    "401": "No valid API key.",
    "404": "There is no such model.",
    "408": "The body did not arrive in time.",
    "413": "The body is too long.",
    "429": "This key's own limit: `rate_limit_exceeded`.",
    "500": "An error of the server's.",
    "503": "Not now: the `code` is the reason, `Retry-After` says when.",
}
_HEADERS: dict[str, tuple[str, ...]] = {
    "200": ("x-request-id", "x-quire-degraded"),
    "429": ("x-request-id", "retry-after"),
    "503": ("x-request-id", "retry-after", "x-quire-degraded"),
}
_ABOUT_HEADERS = {
    "x-request-id": "The request's own, or a new one.",
    "x-quire-degraded": "What was done to answer at all: `deadline`, `halved_max_tokens`, `out_of_memory`.",
    "retry-after": "Seconds.",
}
_READING = ("401", "500", "503")
_POSTING = ("400", "401", "404", "408", "413", "500", "503")


def document(
    models: Sequence[str] = (),
    vocab_size: int | None = None,
    text_vocab_size: int | None = None,
    defaults: SamplingDefaults | None = None,
) -> Schema:
    """The document, of one server where its models' names and vocabularies (of the model, and of its
    tokenizer) are given; of any server otherwise.
    """
    defaults = defaults or SamplingDefaults()
    chat = openapi_requests.chat(models, vocab_size, defaults)
    completion = openapi_requests.completion(models, vocab_size, defaults)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": __version__, "license": {"name": "Apache-2.0"}},
        "security": [{"key": []}],
        "paths": {
            "/v1/chat/completions": _post(
                "chat", "Answer a conversation.", chat, "ChatCompletion", ("429",), "ChatCompletionChunk"
            ),
            "/v1/completions": _post(
                "complete", "Go on with a text.", completion, "Completion", ("429",), "Completion"
            ),
            "/v1/models": _get("models", "The models that are served.", "Models"),
            "/v1/models/{model}": _model_route(models),
            "/tokenize": _post(
                "tokenize",
                "The tokens of a text or of a conversation.",
                openapi_requests.tokenize(models),
                "Tokens",
            ),
            "/detokenize": _post(
                "detokenize",
                "The text of tokens.",
                openapi_requests.detokenize(models, text_vocab_size or vocab_size),
                "Text",
            ),
            "/reset_prefix_cache": {
                "post": _operation("resetPrefixCache", "Forget every cached prefix.", "Empty", _READING)
            },
            "/health": _health(),
            "/metrics": _metrics(),
            "/version": _get("version", "The server's version.", "Version"),
            "/openapi.json": {
                "get": _operation("openapi", "This document.", None, _READING)
                | {"responses": _answers({"application/json": {"schema": {"type": "object"}}}, _READING)}
            },
        },
        "components": {
            "schemas": components(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _post(
    name: str,
    summary: str,
    request: Schema,
    answer: str,
    more_errors: Sequence[str] = (),
    chunk: str | None = None,
) -> Schema:
    operation = _operation(name, summary, answer, (*_POSTING, *more_errors), chunk)
    body = {"required": True, "content": {"application/json": {"schema": request}}}
    return {"post": operation | {"requestBody": body}}


def _get(name: str, summary: str, answer: str) -> Schema:
    return {"get": _operation(name, summary, answer, _READING)}


def _model_route(models: Sequence[str]) -> Schema:
    schema: Schema = {"enum": list(models)} if models else {"type": "string"}
    parameter = {"name": "model", "in": "path", "required": True, "schema": schema}
    operation = _operation("model", "One of them.", "Model", (*_READING, "404"))
    return {"get": operation | {"parameters": [parameter]}}


def _health() -> Schema:
    about = "Whether to run a completion now; this needs a key."
    parameter = {"name": "deep", "in": "query", "schema": {"type": "boolean"}, "description": about}
    responses = _answers({"application/json": {"schema": ref("Health")}}, ("400", "401", "500"))
    responses["503"] = {
        "description": "Requests cannot be answered.",
        "content": {"application/json": {"schema": ref("Health")}},
    }
    operation = {"operationId": "health", "summary": "What is well and what is not, with numbers."}
    return {
        "get": operation | {"parameters": [parameter], "security": [{}, {"key": []}], "responses": responses}
    }


def _metrics() -> Schema:
    operation = {"operationId": "metrics", "summary": "Prometheus metrics.", "security": [{}]}
    return {
        "get": operation | {"responses": _answers({"text/plain": {"schema": {"type": "string"}}}, ("500",))}
    }


def _operation(
    name: str, summary: str, answer: str | None, errors: Sequence[str], chunk: str | None = None
) -> Schema:
    content: dict[str, Schema] = {"application/json": {"schema": ref(answer)}} if answer else {}
    if chunk:
        content["text/event-stream"] = {
            "schema": {"type": "string", "description": f"Events, each a {chunk}, then [DONE]."}
        }
    return {"operationId": name, "summary": summary, "responses": _answers(content, errors)}


def _answers(content: dict[str, Schema], errors: Sequence[str]) -> dict[str, Schema]:
    answers: dict[str, Schema] = {
        "200": {"description": "The answer.", "headers": _headers("200"), "content": content}
    }
    for status in sorted(errors):
        answers[status] = {
            "description": ERRORS[status],
            "headers": _headers(status),
            "content": {"application/json": {"schema": ref("Error")}},
        }
    return answers


def _headers(status: str) -> Schema:
    names = _HEADERS.get(status, ("x-request-id",))
    return {name: {"schema": {"type": "string"}, "description": _ABOUT_HEADERS[name]} for name in names}
