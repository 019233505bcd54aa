"""The form of an answer: OpenAI's and vLLM's fields, one of them, and what each refusal names."""

import json

import pytest

from quire_http.errors import ApiError
from tests.server.api.protocol.test_requests import chat, completion

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
OPENAI = {"type": "json_schema", "json_schema": {"name": "a_b-1", "strict": True, "schema": SCHEMA}}


def form(fields):
    """The structured output that a chat with these fields asks for."""
    return chat(**fields).generation.form


def described(**more):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, **more}}}


TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("fields", "kind", "text", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "json", {"type": "object"}, "response_format"),
        ({"response_format": OPENAI}, "json", SCHEMA, "response_format.json_schema.schema"),
        ({"structured_outputs": {"json": SCHEMA}}, "json", SCHEMA, "structured_outputs.json"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json", SCHEMA, "structured_outputs.json"),
        (
            {"structured_outputs": {"json_object": True}},
            "json",
            {"type": "object"},
            "structured_outputs.json_object",
        ),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"], "structured_outputs.choice"),
    ],
)
def test_every_spelling_of_a_form_is_understood(fields, kind, text, param):
    wanted = form(fields)
    assert (wanted.kind, json.loads(wanted.text), wanted.param) == (kind, text, param)


@pytest.mark.parametrize("name", ["regex", "grammar"])
def test_texts_are_taken_as_they_are(name):
    wanted = form({"structured_outputs": {name: "a\n\0", "json": None}})
    assert (wanted.kind, wanted.text, wanted.param) == (name, "a\n\0", f"structured_outputs.{name}")


def test_text_is_no_form_and_may_stand_beside_one():
    assert form({"response_format": {"type": "text"}}) is None
    both = {"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}}
    assert form(both).kind == "regex"


def test_chats_and_completions_take_vllm_s_field_and_only_chats_openai_s_default():
    assert chat(structured_outputs={"regex": "a"}).generation.form.text == "a"
    assert completion(structured_outputs={"regex": "a"}).generation.form.text == "a"
    assert chat(response_format=OPENAI).generation.form.kind == "json"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
        (described(name=""), "response_format.json_schema.name"),
        (described(name="a b"), "response_format.json_schema.name"),
        (described(schema=[]), "response_format.json_schema.schema"),
        (described(strict="yes"), "response_format.json_schema.strict"),
        (described(other=1), "response_format.json_schema.other"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
        ),
        ({"structured_outputs": {"json": []}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a"] * 1001}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": "a"}, "response_format": OPENAI}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
        (
            {"structured_outputs": {"regex": "a"}, "tools": [TOOL], "tool_choice": "required"},
            "structured_outputs.regex",
        ),
        ({"guided_json": {}}, "guided_json"),
    ],
)
def test_what_is_wrong_or_not_supported_is_a_400_that_names_it(fields, param):
    with pytest.raises(ApiError) as refused:
        chat(**fields)
    assert refused.value.status == 400
    assert refused.value.body["error"]["param"] == param
