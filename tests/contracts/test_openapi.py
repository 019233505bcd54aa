"""The OpenAPI document says what the parsers do: each field, each bound, each route, and nothing else."""

import pytest
from jsonschema import Draft202012Validator

from quire_server.api import calls, openapi
from quire_server.api.app import ROUTES
from quire_server.api.auth import PUBLIC_PATHS
from quire_server.api.errors import ApiError
from quire_server.api.fields import Fields
from quire_server.api.sampling_defaults import SamplingDefaults
from tests.server.api import field_values

VOCAB = 258
DOCUMENT = openapi.document(("tiny",), VOCAB)
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
PARSERS = {CHAT: calls.parse_chat, COMPLETION: calls.parse_completion}
MINIMAL = {
    CHAT: {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]},
    COMPLETION: {"model": "tiny", "prompt": "hi"},
}
# What a field needs beside it to mean anything.
COMPANIONS = {
    "top_logprobs": {"logprobs": True},
    "stream_options": {"stream": True},
    "max_tokens": {"echo": True},
    "min_tokens": {"max_tokens": 2**63},
}
CASES = [(path, name) for path in PARSERS for name in field_values.properties(DOCUMENT, path)]


def parse(path, body):
    return PARSERS[path](dict(body), SamplingDefaults(), VOCAB)


def beside(path, name):
    known = field_values.properties(DOCUMENT, path)
    return {key: value for key, value in COMPANIONS.get(name, {}).items() if key in known}


def test_the_document_is_a_valid_schema_in_all_its_parts():
    for path in PARSERS:
        for schema in field_values.properties(DOCUMENT, path).values():
            Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("path", PARSERS)
def test_the_document_names_exactly_the_fields_that_the_parser_looks_for(path, monkeypatch):
    taken = set()

    class Recording(Fields):
        def take(self, name):
            if not self._prefix:
                taken.add(name)
            return super().take(name)

    monkeypatch.setattr(calls, "Fields", Recording)
    parse(path, MINIMAL[path])
    assert taken == set(field_values.properties(DOCUMENT, path))


@pytest.mark.parametrize(("path", "name"), CASES)
def test_what_the_document_allows_is_accepted(path, name):
    for value in field_values.accepted(field_values.properties(DOCUMENT, path)[name]):
        if value is None and name in ("model", "prompt", "messages"):
            continue
        parse(path, MINIMAL[path] | beside(path, name) | {name: value})


@pytest.mark.parametrize(("path", "name"), CASES)
def test_what_the_document_excludes_is_refused_by_name(path, name):
    for value in field_values.refused(field_values.properties(DOCUMENT, path)[name]):
        if name == "model" and isinstance(value, str) and value:
            continue  # another model's name is for the house to refuse
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
    assert methods == {path: {method} for path, (method, _) in ROUTES.items()}


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
