"""The items that a kept response was asked with, as OpenAI lists them: page by page, and by ids of their own.

A conversation is kept as the messages that chat templates take, so parts of a text are one, and calls stand
after the text of their message. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import parse_qsl

from quire_http.errors import bad_field
from quire_server.api.protocol.validation import Json

MAX_ITEMS, DEFAULT_ITEMS = 100, 20
ORDERS = ("desc", "asc")


@dataclass(frozen=True)
class Page:
    """Which items are asked for."""

    limit: int = DEFAULT_ITEMS
    order: str = ORDERS[0]
    after: str = ""  # the id of the item before them

    @classmethod
    def parse(cls, query: bytes) -> Page:
        """Raises ApiError."""
        given: dict[str, str] = {}
        for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
            if name not in ("limit", "order", "after"):
                raise bad_field(name[:64], "is not a known or supported parameter of the query")
            if name in given:
                raise bad_field(name, "is given twice; give it once")
            given[name] = value
        limit, order = given.get("limit", str(DEFAULT_ITEMS)), given.get("order", ORDERS[0])
        is_number = limit.isascii() and limit.isdecimal() and len(limit) < 4
        if not is_number or not 1 <= int(limit) <= MAX_ITEMS:
            raise bad_field("limit", f"must be an integer between 1 and {MAX_ITEMS}")
        if order not in ORDERS:
            raise bad_field("order", f"must be one of {', '.join(ORDERS)}")
        return cls(int(limit), order, given.get("after", ""))

    def of(self, items: Sequence[Json]) -> Json:
        """The answer. Raises ApiError where no item has the id."""
        ordered = list(items) if self.order == "asc" else list(reversed(items))
        begin = 0
        if self.after:
            ids = [item["id"] for item in ordered]
            if self.after not in ids:
                raise bad_field("after", "is the id of no item of this response")
            begin = ids.index(self.after) + 1
        found = ordered[begin : begin + self.limit]
        return {
            "object": "list",
            "data": found,
            "first_id": found[0]["id"] if found else None,
            "last_id": found[-1]["id"] if found else None,
            "has_more": begin + self.limit < len(ordered),
        }


def input_items(response_id: str, conversation: Sequence[Json]) -> list[Json]:
    """Those of a conversation whose last message is the response."""
    answer, found = response_id.rpartition("_")[2], list[Json]()
    for message in conversation[:-1]:
        for kind, item in _items(message):
            item_id = f"{kind}_{answer}_in{len(found)}"
            found.append({"id": item_id, "status": "completed", **item})
    return found


def _items(message: Json) -> Iterator[tuple[str, Json]]:
    """(the beginning of its id, the item) of each that is in a message."""
    role, text = message["role"], message["content"]
    if role == "tool":
        yield "fco", {"type": "function_call_output", "call_id": message["tool_call_id"], "output": text}
        return
    if thought := message.get("reasoning_content"):
        yield (
            "rs",
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": thought}]},
        )
    calls = message.get("tool_calls", ())
    if text or not (calls or thought):
        part: Json = {"type": "input_text", "text": text}
        if role == "assistant":
            part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        yield "msg", {"type": "message", "role": role, "content": [part]}
    for call in calls:
        function = call["function"]
        arguments = function["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        called = {"call_id": call["id"], "name": function["name"], "arguments": arguments}
        yield "fc", {"type": "function_call", **called}
