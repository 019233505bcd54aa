"""The OpenAPI document agrees with the validation: each field, each bound, each route, and nothing else."""

import pytest
from jsonschema import Draft202012Validator

from quire_http.errors import ApiError
from quire_server.api import openapi
from quire_server.api.auth import PUBLIC_PATHS
from quire_server.api.protocol import messages, openai_responses, requests
from quire_server.api.protocol.validation import validate
from quire_server.api.routes import REQUESTS, router
from quire_server.model_dir.generation_config import SamplingDefaults
from tests.server.api import field_values

VOCAB = 258
DOCUMENT = openapi.document(("tiny",), VOCAB)
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MESSAGES, COUNT, RESPONSES = "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"
PARSERS = {
    CHAT: requests.parse_chat,
    COMPLETION: requests.parse_completion,
    MESSAGES: messages.parse_messages,
    COUNT: lambda body, *_: validate(messages.CountTokensRequest, body).to_call(),
    RESPONSES: lambda body, defaults, vocab: openai_responses.parse_responses(body, vocab).to_call(
        defaults, vocab, lambda _: []
    ),
}
MINIMAL = {
    CHAT: {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]},
    COMPLETION: {"model": "tiny", "prompt": "hi"},
    MESSAGES: {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    COUNT: {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]},
    RESPONSES: {"model": "tiny", "input": "hi"},
}
# What a field needs beside it to mean anything.
COMPANIONS = {
    "top_logprobs": {"logprobs": True},
    "stream_options": {"stream": True},
    "resume": {"stream": True},
    "max_tokens": {"echo": True},
    "min_tokens": {"max_tokens": 2**63 - 1},
}
TOOLS = {
    CHAT: {"type": "function", "function": {"name": "x"}},
    MESSAGES: {"name": "x", "input_schema": {}},
    COUNT: {"name": "x", "input_schema": {}},
    RESPONSES: {"type": "function", "name": "x"},
}
CASES = [(path, name) for path in PARSERS for name in field_values.properties(DOCUMENT, path)]


def parse(path, body):
    return PARSERS[path](dict(body), SamplingDefaults(), VOCAB)


def named_apart(tools):
    """The same tools, each with a name of its own."""
    return [
        {
            **tool,
            **({"function": {**tool["function"], "name": name}} if "function" in tool else {"name": name}),
        }
        for number, tool in enumerate(tools)
        for name in [f"x{number}"]
    ]


def beside(path, name):
    if name == "tool_choice":
        return {"tools": [TOOLS[path]]}
    known = field_values.properties(DOCUMENT, path)
    return {key: value for key, value in COMPANIONS.get(name, {}).items() if key in known}


def test_the_document_is_a_valid_schema_in_all_its_parts():
    for path in PARSERS:
        for schema in field_values.properties(DOCUMENT, path).values():
            Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("path", PARSERS)
def test_the_document_names_exactly_the_fields_that_the_parser_looks_for(path):
    """Of all fields that any request has, those that the document does not name are refused as unknown."""

    def is_known(name):
        try:
            parse(path, MINIMAL[path] | {name: object()})
        except ApiError as error:
            return "is not a known" not in str(error)
        return True

    declared = {name for model in REQUESTS for name in model.model_fields}
    taken = {name for name in declared if is_known(name)}
    assert taken == set(field_values.properties(DOCUMENT, path))


@pytest.mark.parametrize(("path", "name"), CASES)
def test_what_the_document_allows_is_accepted(path, name):
    for value in field_values.accepted(field_values.properties(DOCUMENT, path)[name]):
        if value is None and name in ("model", "prompt", "messages"):
            continue
        value = named_apart(value) if name == "tools" and value else value
        parse(path, MINIMAL[path] | beside(path, name) | {name: value})


@pytest.mark.parametrize(("path", "name"), CASES)
def test_what_the_document_excludes_is_refused_by_name(path, name):
    for value in field_values.refused(field_values.properties(DOCUMENT, path)[name]):
        if name == "model" and isinstance(value, str) and value:
            continue  # another model's name is refused by the server
        with pytest.raises(ApiError) as caught:
            parse(path, MINIMAL[path] | beside(path, name) | {name: value})
        assert caught.value.status == 400, field_values.name(value)
        assert caught.value.body["error"]["param"].startswith(name), field_values.name(value)


@pytest.mark.parametrize("path", PARSERS)
def test_a_field_that_the_document_does_not_name_is_refused(path):
    with pytest.raises(ApiError) as caught:
        parse(path, MINIMAL[path] | {"undocumented": 1})
    assert caught.value.body["error"]["param"] == "undocumented"


def test_the_document_has_every_route_and_no_other():
    methods = {path: {method.upper() for method in item} for path, item in DOCUMENT["paths"].items()}
    assert methods.pop("/v1/models/{model}") == {"GET"}
    served = {}
    for route in router.routes:
        served[route.path] = served.get(route.path, set()) | route.methods
    assert served.pop("/v1/models/{model:path}") == {"GET"}
    for page in ("/", "/docs", "/docs/{name}"):  # for people: no part of the API
        assert served.pop(page) == {"GET"}
    assert methods == served


def test_only_public_routes_are_documented_as_public():
    public = {
        path
        for path, item in DOCUMENT["paths"].items()
        for operation in item.values()
        if {} in operation.get("security", DOCUMENT["security"])
    }
    assert public == PUBLIC_PATHS


def test_every_field_says_what_it_means():
    for path in PARSERS:
        for name, schema in field_values.properties(DOCUMENT, path).items():
            assert schema["description"], name
