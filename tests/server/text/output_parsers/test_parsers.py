"""Calls are found in what models write, however it is split, and nothing of what is no call is lost."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_server.text.output_parsers import TOOL_FORMS, Arguments, CallName, Text
from tests.examples import examples
from tests.server.text.output_parsers.corpus import CORPUS, NAMES, Answer


def parsed(form: str, *parts: str) -> Answer:
    parser = TOOL_FORMS[form].parser(NAMES)
    pieces = [piece for part in parts for piece in parser.push(part)] + parser.finish()
    text, calls = "", []
    for piece in pieces:
        match piece:
            case Text():
                text += piece.text
            case CallName():
                calls.append((piece.name, ""))
            case Arguments():
                name, arguments = calls[-1]
                calls[-1] = (name, arguments + piece.text)
    return Answer(text, tuple(calls))


def splits(text: str) -> list[tuple[str, ...]]:
    """The text in one piece, in its characters, and in two pieces at every place."""
    return [(text,), tuple(text), *((text[:at], text[at:]) for at in range(1, len(text)))]


@pytest.mark.parametrize(("form", "written", "wanted"), CORPUS)
def test_the_corpus_is_read_as_it_is_meant_at_every_split(form: str, written: str, wanted: Answer) -> None:
    for parts in splits(written):
        found = parsed(form, *parts)
        assert found.text == wanted.text
        assert [(name, json.loads(arguments)) for name, arguments in found.calls] == [
            (name, json.loads(arguments)) for name, arguments in wanted.calls
        ]


@pytest.mark.parametrize("value", ['"\\ud800"', "NaN", "1e400"])
def test_a_call_whose_arguments_cannot_be_sent_is_none(value: str) -> None:
    written = f'<tool_call>{{"arguments": {{"city": {value}}}, "name": "weather"}}</tool_call>'
    for parts in splits(written):
        assert not parsed("Hermes", *parts).calls


def test_each_family_has_thirty_texts() -> None:
    for form in TOOL_FORMS:
        assert sum(one[0] == form for one in CORPUS) >= 30, form


MARKERS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "```tool_code\n", "```"]
WORDS = ['"name"', '"arguments"', '"parameters"', '"weather"', "weather", "add", "a=", "null", "1", "é", "x"]
CALLS = ['{"name": "weather", "arguments": ', '{"city": "Oslo"}', 'weather(city="Oslo")']
FRAGMENTS = st.sampled_from([*MARKERS, *WORDS, *CALLS, *'{}[]():,;"\\\n '])


@pytest.mark.parametrize("form", TOOL_FORMS)
@settings(max_examples=examples(300))
@given(parts=st.lists(FRAGMENTS, max_size=25), cuts=st.lists(st.integers(0, 200), max_size=8))
def test_any_text_is_read_the_same_at_every_split_and_text_without_calls_is_whole(
    form: str, parts: list[str], cuts: list[int]
) -> None:
    text = "".join(parts)
    whole = parsed(form, text)
    assert parsed(form, *text) == whole
    places = sorted({min(cut, len(text)) for cut in cuts})
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    assert parsed(form, *pieces) == whole
    if not whole.calls:
        assert whole.text == text
    assert all(name in NAMES for name, _ in whole.calls)


@pytest.mark.parametrize("form", TOOL_FORMS)
@pytest.mark.parametrize(
    "written",
    [
        "<tool_call>" * 20_000,
        '<tool_call>{"name": "weather", "arguments": ' + '{"a": ' * 50_000,
        '<tool_call>{"arguments": {"a": "' + "x" * 200_000,
        '{"name": "weather", "parameters": {"a": "' + "\\" * 100_000,
        "[weather(city=" + "[" * 100_000,
        "[weather(city=" + "-" * 60_000 + "1)]",
        "[weather(city=" + "(" * 60 + "-" * 60_000 + "1" + ")" * 61 + "]",
        "[TOOL_CALLS]" + "[" * 100_000,
        "```tool_code\n" * 10_000,
        " " * 200_000,
    ],
    ids=range(10),
)
def test_a_hostile_text_takes_as_long_as_it_is_and_not_longer(form: str, written: str) -> None:
    """The test's own time limit ends what is worse than linear."""
    found = parsed(form, *(written[at : at + 50] for at in range(0, len(written), 50)))
    assert len(found.text) + sum(len(arguments) for _, arguments in found.calls) <= len(written) + 10
