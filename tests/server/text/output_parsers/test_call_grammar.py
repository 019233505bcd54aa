"""What an enforced call may be: a call of a tool, with arguments of its schema, that the form's parser
reads.
"""

from __future__ import annotations

import json

import pytest

from quire_server.text.output_parsers import TOOL_FORMS, Arguments, CallName, Text
from quire_server.text.output_parsers.call_grammar import CallGrammar
from tests.server.text.toy import SPECIAL, accepts, matcher

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
ADD = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/Number"}},
    "$defs": {"Number": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
SCHEMAS = {"weather": WEATHER, "add": ADD}


def text(form: str, *, is_parallel: bool = True, is_free: bool = False) -> str:
    return CallGrammar(form, SCHEMAS, is_parallel, is_free).to_json()


def written(form: str, *calls: tuple[str, object]) -> str:
    """Calls as the grammar has them, after the opening."""
    one = TOOL_FORMS[form]
    objects = [f'{{"name": "{name}", "{one.arguments}": {json.dumps(given)}}}' for name, given in calls]
    return one.between.join(objects) + one.closing


RIGHT = (
    [("weather", {"city": "Oslo"})],
    [("add", {"a": 1})],
    [("weather", {"city": 'a}<]\\"'}), ("add", {"a": -2})],
)
WRONG = [("weather", {"city": 5})], [("weather", {})], [("add", {"city": "Oslo"})], [("unknown", {})], []


@pytest.mark.parametrize("form", TOOL_FORMS)
def test_calls_that_satisfy_the_schema_are_all_that_is_allowed_and_the_parser_reads_them(form: str) -> None:
    for calls in RIGHT:
        answer = written(form, *calls)
        assert accepts("tools", text(form), answer)
        pieces = TOOL_FORMS[form].parser(SCHEMAS).push(TOOL_FORMS[form].opening + answer)
        assert [one.name for one in pieces if isinstance(one, CallName)] == [name for name, _ in calls]
        assert [json.loads(one.text) for one in pieces if isinstance(one, Arguments)] == [
            given for _, given in calls
        ]
        assert not any(isinstance(one, Text) for one in pieces)
    for calls in WRONG:
        assert not accepts("tools", text(form), written(form, *calls))
    assert not accepts("tools", text(form), "Once upon a time")


@pytest.mark.parametrize("form", TOOL_FORMS)
def test_without_parallel_calls_there_is_one(form: str) -> None:
    first, both = RIGHT[0], RIGHT[2]
    assert accepts("tools", text(form, is_parallel=False), written(form, *first))
    assert not accepts("tools", text(form, is_parallel=False), written(form, *both))


@pytest.mark.parametrize("form", TOOL_FORMS)
def test_a_free_answer_is_any_text_and_its_calls_satisfy_the_schema(form: str) -> None:
    opening, free = TOOL_FORMS[form].opening, text(form, is_free=True)
    for answer in ("", "Once upon a time", "a < b [x] (y)\n"):
        assert accepts("tools", free, answer)
    assert accepts("tools", free, opening + written(form, *RIGHT[0]))
    assert not accepts("tools", free, opening + written(form, *WRONG[0]))
    assert not accepts("tools", free, opening + written(form, *WRONG[3]))
    if opening:
        assert accepts("tools", free, "Let me look. " + opening + written(form, *RIGHT[1]) + " Done.")


@pytest.mark.parametrize(
    ("form", "marker"), [("Hermes", "<tool_call>"), ("Mistral", "[TOOL_CALLS]"), ("Llama", "<|python_tag|>")]
)
def test_a_marker_that_is_a_special_token_begins_a_free_answers_call(form: str, marker: str) -> None:
    """Text never matches a special token: without its id no call could begin."""
    free = CallGrammar(form, SCHEMAS, is_parallel=True, is_free=True, special={marker: SPECIAL}).to_json()
    rest = TOOL_FORMS[form].opening.removeprefix(marker)
    for before in ("", "Let me look. "):
        for calls, is_right in (
            *((calls, True) for calls in RIGHT),
            *((calls, False) for calls in WRONG[:4]),
        ):
            tokens = [*before.encode(), SPECIAL, *(rest + written(form, *calls)).encode()]
            one = matcher("tools", free)
            assert (one.try_consume_tokens(tokens) == len(tokens) and one.is_accepting()) == is_right, calls
    assert accepts("tools", free, "Once upon a time")


def test_a_thought_whose_ends_are_special_tokens_may_come_before_a_call() -> None:
    free = CallGrammar(
        "Hermes", SCHEMAS, is_parallel=True, is_free=True, special={"<think>": SPECIAL, "</think>": SPECIAL}
    ).to_json()
    call = TOOL_FORMS["Hermes"].opening + written("Hermes", *RIGHT[0])
    tokens = [SPECIAL, *b"hm", SPECIAL, *f"\n\n{call}".encode()]
    one = matcher("tools", free)
    assert one.try_consume_tokens(tokens) == len(tokens) and one.is_accepting()


@pytest.mark.parametrize("form", TOOL_FORMS)
def test_with_a_schema_of_answers_the_model_gives_such_a_one_or_calls(form: str) -> None:
    answer = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    one = CallGrammar(form, SCHEMAS, is_parallel=True, is_free=True, answer=answer).to_json()
    opening = TOOL_FORMS[form].opening
    assert accepts("tools", one, '{"n": 5}')
    assert accepts("tools", one, opening + written(form, *RIGHT[2]))
    for wrong in ('{"n": "x"}', "It is five.", opening + written(form, *WRONG[0]), ""):
        assert not accepts("tools", one, wrong)
