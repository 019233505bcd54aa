"""Tools for chat templates without support for them: their definitions, and how to call them, as a system
message.

Calls and results in the conversation become the text that such a message asks for. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quire_server.text.output_parsers.tool_forms import ToolForm

_ABOUT = """You may call functions to help with the user's request. Their signatures, one a line:
<tools>
{tools}
</tools>
To call a function, answer with its name and its arguments as a JSON object, like this:
{example}"""

Message = Mapping[str, Any]


def without_tools(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], form: ToolForm
) -> list[dict[str, Any]]:
    """The same conversation in messages of system, user and assistant alone, its calls in a form."""
    found: list[dict[str, Any]] = []
    for message in messages:
        plain = _plain(message, form)
        if message["role"] == "tool" and found and found[-1].get("role") == "user":
            found[-1]["content"] += f"\n{plain['content']}"  # many templates want roles that alternate
        else:
            found.append(plain)
    if not tools:
        return found
    example = form.written([{"name": "the function's name", "arguments": {}}])
    about = _ABOUT.format(
        tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools), example=example
    )
    if found and found[0]["role"] == "system":
        return [{**found[0], "content": f"{found[0]['content']}\n\n{about}"}, *found[1:]]
    return [{"role": "system", "content": about}, *found]


def _plain(message: Message, form: ToolForm) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if not (calls := message.get("tool_calls")):
        return dict(message)
    written = form.written([one["function"] for one in calls])
    return {"role": "assistant", "content": "\n".join(filter(None, [message["content"], written]))}
