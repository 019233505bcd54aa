"""Chat templates without support for tools: definitions, calls and results become plain messages."""

from __future__ import annotations

from typing import Any

import pytest

from quire_server.text.output_parsers import TOOL_FORMS, Arguments, CallName
from quire_server.text.output_parsers.families import thinks, tool_form_of
from quire_server.text.tool_prompt import without_tools

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"type": "function", "id": "1", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "How is the weather?"},
    {"role": "assistant", "content": "Let me look.", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "Rain.", "tool_call_id": "1"},
    {"role": "tool", "content": "Snow.", "tool_call_id": "1"},
]


@pytest.mark.parametrize("form", TOOL_FORMS.values(), ids=TOOL_FORMS)
def test_a_conversation_with_calls_gets_three_roles_and_calls_as_they_are_parsed(
    form: Any,
) -> None:
    rendered = without_tools(CONVERSATION, [TOOL], form)
    assert [one["role"] for one in rendered] == ["system", "user", "assistant", "user"]
    assert all(set(one) == {"role", "content"} for one in rendered)
    assert '"name": "weather"' in rendered[0]["content"]
    pieces = form.parser(["the function's name"]).push(rendered[0]["content"].partition("like this:\n")[2])
    assert [one.name for one in pieces if isinstance(one, CallName)] == ["the function's name"]
    pieces = form.parser(["weather"]).push(rendered[2]["content"].removeprefix("Let me look.\n"))
    assert [one.text for one in pieces if isinstance(one, Arguments)] == ['{"city": "Zürich"}'] * 2
    assert rendered[3]["content"].index("Rain.") < rendered[3]["content"].index("Snow.")


def test_a_system_message_is_kept_and_without_tools_nothing_is_added() -> None:
    system = {"role": "system", "content": "Be brief."}
    form = TOOL_FORMS["Hermes"]
    (rendered, _) = without_tools([system, CONVERSATION[0]], [TOOL], form)
    assert rendered["content"].startswith("Be brief.\n\n")
    assert without_tools([system, CONVERSATION[0]], [], form) == [system, CONVERSATION[0]]


@pytest.mark.parametrize(
    ("template", "form", "has_thoughts"),
    [
        ("{% for tool in tools %}<tool_call>{% endfor %}", "Hermes", False),
        ("<tool_call> {{ '</think>' }}", "Hermes", True),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "Mistral", False),
        ("<|python_tag|> {{ tools }}", "Llama", False),
        ("<start_of_turn>user", "Gemma", False),
        ("<|im_start|>", "Hermes", False),
    ],
)
def test_the_form_and_the_thoughts_follow_from_the_template(
    template: str, form: str, has_thoughts: bool
) -> None:
    assert (tool_form_of(template), thinks(template)) == (form, has_thoughts)
