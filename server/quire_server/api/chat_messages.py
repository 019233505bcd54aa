"""The messages of a chat, checked one by one and turned into what a chat template takes.

Called by `calls` and by /tokenize. Text only: parts of other kinds are refused. Pure.
"""

from __future__ import annotations

from quire_server.api.errors import bad_field
from quire_server.api.fields import Fields

MAX_MESSAGES = 4096
MAX_NAME = 256
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def parse_messages(fields: Fields) -> tuple[dict[str, str], ...]:
    """The messages of a chat, as the chat template takes them."""
    value = fields.take("messages")
    if not isinstance(value, list) or not 0 < len(value) <= MAX_MESSAGES:
        raise fields.error("messages", f"must be a list of 1 to {MAX_MESSAGES} messages")
    return tuple(_message(item, f"messages[{position}]") for position, item in enumerate(value))


def _message(value: object, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise bad_field(where, "must be an object")
    fields = Fields(value, f"{where}.")
    role = fields.take("role")
    if not isinstance(role, str) or role not in ROLES:
        raise fields.error("role", f"must be one of {', '.join(ROLES)}")
    message = {"role": ROLES[role], "content": _content(fields)}
    name = fields.text("name", "", MAX_NAME)
    for unused in ("tool_calls", "annotations"):  # empty where a client sends an answer of ours back
        fields.only(unused, ([],))
    fields.end()
    return {**message, "name": name} if name else message


def _content(fields: Fields) -> str:
    content = fields.take("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise fields.error("content", "must be a string or a list of text parts")
    texts: list[str] = []
    for position, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str) or set(part) != {"type", "text"}:
            raise fields.error(f"content[{position}]", 'must be {"type": "text", "text": "..."}')
        texts.append(text)
    return "\n".join(texts)
