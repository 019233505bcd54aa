"""A thought is apart from the answer, at every split, and what is no thought is the answer."""

from __future__ import annotations

import pytest

from quire_server.text.output_parsers import TOOL_FORMS, CallName, Reasoning, Text, output_parser

CALL = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'


def parsed(*parts: str, is_thinking: bool = False) -> tuple[str, str, list[str]]:
    parser = output_parser(TOOL_FORMS["Hermes"], ["add"], thinks=True, is_thinking=is_thinking)
    pieces = [piece for part in parts for piece in parser.push(part)] + parser.finish()
    thought = "".join(one.text for one in pieces if isinstance(one, Reasoning))
    text = "".join(one.text for one in pieces if isinstance(one, Text))
    return thought, text, [one.name for one in pieces if isinstance(one, CallName)]


@pytest.mark.parametrize(
    ("written", "is_thinking", "wanted"),
    [
        ("<think>\nIt is 4.\n</think>\n\nFour.", False, ("It is 4.", "Four.", [])),
        ("It is 4.\n</think>\n\nFour.", True, ("It is 4.", "Four.", [])),
        ("\n<think>a</think>b", False, ("a", "b", [])),
        ("<think>\n\n</think>\n\nFour.", False, ("", "Four.", [])),
        ("Four.", False, ("", "Four.", [])),
        (" Four.", False, ("", " Four.", [])),
        ("<thin", False, ("", "<thin", [])),
        ("<thinking> is a word", False, ("", "<thinking> is a word", [])),
        ("Four <think>is</think> a number", False, ("", "Four <think>is</think> a number", [])),
        ("<think>cut at its len", False, ("cut at its len", "", [])),
        ("cut </thin", True, ("cut </thin", "", [])),
        (f"<think>{CALL}</think>{CALL}", False, (CALL, "", ["add"])),
        (f"a</think>\n\nb\n{CALL}", True, ("a", "b", ["add"])),
    ],
)
def test_a_thought_is_apart_from_the_answer(
    written: str, is_thinking: bool, wanted: tuple[str, str, list[str]]
) -> None:
    for parts in ((written,), tuple(written), *((written[:at], written[at:]) for at in range(len(written)))):
        assert parsed(*parts, is_thinking=is_thinking) == wanted


def test_whether_it_thinks_is_known_while_it_does() -> None:
    parser = output_parser(None, (), thinks=True, is_thinking=False)
    parser.push("<think>It is")
    assert parser.is_thinking
    parser.push(" 4.</think>")
    assert not parser.is_thinking
