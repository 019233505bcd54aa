"""OpenAI's Responses: an answer as output items, whole or as a stream of numbered events.

Dictionaries are built here and nowhere else; tests compare them with the models of
`protocol.openai_response_bodies`. The usage comes last in a response: a gateway finds it there, whatever
objects of the client's stand before it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from quire_http.errors import ApiError
from quire_http.exchange import HttpExchange, to_json
from quire_server.api.output_pieces import CALL, TEXT, THOUGHT, Piece, pieces
from quire_server.api.output_processor import OutputDelta
from quire_server.api.protocol.generation import Generation
from quire_server.api.protocol.tools import ArgumentsText
from quire_server.api.request_context import RequestContext
from quire_server.api.response_formatter import Header, Response, count, usage
from quire_server.api.response_store import StoredResponse

Json = dict[str, object]
_PREFIXES = {TEXT: "msg_", THOUGHT: "rs_", CALL: "fc_"}
_KINDS = {TEXT: "response.output_text", THOUGHT: "response.reasoning_text"}
_ARGUMENTS = "response.function_call_arguments"


@dataclass
class Asked:
    """What a response repeats of its request, and the conversation that may go on after it. ``is_kept``:
    whether the response is stored.
    """

    before: bytes = b"{}"  # JSON: the fields before its model
    after: bytes = b"{}"  # and those after its output
    conversation: bytes = b""  # JSON: a list of messages, as templates take them
    is_kept: bool = False

    @property
    def num_bytes(self) -> int:
        """Its size, until the response is sent."""
        return len(self.before) + len(self.after) + len(self.conversation)


class _Item:
    """One item as it grows."""

    def __init__(self, piece: Piece, index: int, answer: str) -> None:
        self.kind = piece.kind
        self.index = index
        self.item_id = f"{_PREFIXES[piece.kind]}{answer}_{index}"
        self._call_id, self._name = piece.call_id, piece.name
        self.texts: list[str] = []

    @property
    def text(self) -> str:
        """All that it has."""
        return "".join(self.texts)

    def part(self, text: str) -> Json:
        """Its one part with a text."""
        if self.kind == THOUGHT:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def to_json(self, status: str) -> Json:
        """The item, empty while it is in progress."""
        is_begun = status == "in_progress"
        head: Json = {"id": self.item_id}
        if self.kind == CALL:
            text = "" if is_begun else self.text
            call = {"call_id": self._call_id, "name": self._name, "arguments": text}
            return {**head, "type": "function_call", "status": status, **call}
        content = [] if is_begun else [self.part(self.text)]
        if self.kind == THOUGHT:
            return {**head, "type": "reasoning", "status": status, "summary": [], "content": content}
        return {**head, "type": "message", "status": status, "role": "assistant", "content": content}

    def to_call(self) -> Json:
        """A call as chat templates take it."""
        arguments = ArgumentsText().read(self.text)
        function = {"name": self._name, "arguments": arguments}
        return {"id": self._call_id, "type": "function", "function": function}

    def done(self) -> tuple[str, Json]:
        """The event that says its text again, whole."""
        if self.kind == CALL:
            return f"{_ARGUMENTS}.done", {"name": self._name, "arguments": self.text}
        logprobs: Json = {"logprobs": []} if self.kind == TEXT else {}
        return f"{_KINDS[self.kind]}.done", {"content_index": 0, "text": self.text, **logprobs}


class _Items:
    """The items of one response, and the response itself."""

    def __init__(self, request: RequestContext, header: Header, asked: Asked) -> None:
        self.items: list[_Item] = []
        self.last: OutputDelta | None = None
        self._request = request
        self._header = header
        self._asked = asked
        self._answer = header.response_id.rpartition("_")[2]

    def take(self, delta: OutputDelta) -> None:
        """Count a delta."""
        count(self._request.counts, delta)
        self.last = delta

    def add(self, piece: Piece) -> _Item:
        """The item that a piece is of."""
        if piece.opens(self.items[-1].kind if self.items else None):
            self.items.append(_Item(piece, len(self.items), self._answer))
        self.items[-1].texts.append(piece.text)
        return self.items[-1]

    @property
    def status(self) -> str:
        """That of the response, once it has ended."""
        is_cut = self.last is not None and self.last.finish_reason == "length"
        return "incomplete" if is_cut else "completed"

    def body(self, status: str, tokens: Json | None = None, error: Json | None = None) -> bytes:
        """The response, as JSON."""
        output: list[Json] = []
        if status != "in_progress":
            output = [item.to_json("completed") for item in self.items[:-1]]
            output += [item.to_json(status if error is None else "incomplete") for item in self.items[-1:]]
        head = {
            "id": self._header.response_id,
            "object": "response",
            "created_at": self._header.created,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        }
        answer = {"model": self._header.model, "output": output}
        asked, tokens_used = self._asked, {"usage": tokens}
        return _joined(to_json(head), asked.before, to_json(answer), asked.after, to_json(tokens_used))

    def end(self, prompt_tokens: int) -> bytes:
        """The whole response, which is kept where the client wants that."""
        body = self.body(self.status, self._usage(prompt_tokens))
        if self._asked.is_kept:
            earlier = self._asked.conversation.removesuffix(b"]")
            conversation = earlier + b"," + to_json(self._message()) + b"]"
            stored = StoredResponse(body, conversation)
            request = self._request
            request.server.responses.put(request.client, self._header.response_id, stored)
        return body

    def _message(self) -> Json:
        """All items as one message of the assistant's."""
        message: Json = {"role": "assistant", "content": "\n".join(self._texts(TEXT))}
        if thought := "\n".join(self._texts(THOUGHT)):
            message["reasoning_content"] = thought
        if calls := [item.to_call() for item in self.items if item.kind == CALL]:
            message["tool_calls"] = calls
        return message

    def _texts(self, kind: str) -> list[str]:
        return [item.text for item in self.items if item.kind == kind]

    def _usage(self, prompt_tokens: int) -> Json:
        counts = self._request.counts
        return {
            "input_tokens": prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": counts.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": counts.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
            "total_tokens": prompt_tokens + counts.completion_tokens,
        }


class FullItems:
    """One JSON body at the end."""

    def __init__(self, request: RequestContext, items: _Items) -> None:
        self._exchange = request.exchange
        self._items = items

    async def add(self, delta: OutputDelta) -> None:
        """Keep a delta."""
        self._items.take(delta)
        for piece in pieces(delta):
            self._items.add(piece)

    async def finish(self, prompt_tokens: int) -> None:
        """Send everything."""
        await self._exchange.whole(200, self._items.end(prompt_tokens), "application/json")


class StreamedItems:
    """Server-sent events, each with the name of its type and a number. A comment says the usage in the form
    of completions, for a gateway that wants it, which takes it out.
    """

    def __init__(self, request: RequestContext, items: _Items) -> None:
        self._request = request
        self._exchange: HttpExchange = request.exchange
        self._items = items
        self._open: _Item | None = None
        self._num_events = 0

    async def add(self, delta: OutputDelta) -> None:
        """Send the delta."""
        if self._items.last is None:
            self._exchange.describe_failure = self._failed
            for kind in ("response.created", "response.in_progress"):
                await self._send_response(kind, self._items.body("in_progress"))
        self._items.take(delta)
        for piece in pieces(delta):
            if piece.opens(self._open.kind if self._open else None):
                await self._close("completed")
                self._open = self._items.add(piece)
                await self._begin(self._open)
            else:
                self._items.add(piece)
            if piece.text and self._open is not None:
                await self._grow(self._open, piece.text)

    async def finish(self, prompt_tokens: int) -> None:
        """Send the whole response, and the end."""
        items, request = self._items, self._request
        await self._close(items.status)
        body = items.end(prompt_tokens)
        if request.ends_with_usage:
            await self._exchange.comment(b"usage " + to_json(usage(request.counts, prompt_tokens)))
        await self._send_response(f"response.{items.status}", body)
        await self._exchange.end_stream()

    def _failed(self, error: ApiError) -> tuple[str, Json]:
        """The event of a response that fails on the way."""
        reason: Json = {"code": error.code or "server_error", "message": str(error)}
        body = json.loads(self._items.body("failed", error=reason))
        kind = "response.failed"
        return kind, {"type": kind, "sequence_number": self._num_events, "response": body}

    async def _begin(self, item: _Item) -> None:
        await self._send(
            "response.output_item.added", output_index=item.index, item=item.to_json("in_progress")
        )
        if item.kind != CALL:
            await self._about(item, "response.content_part.added", content_index=0, part=item.part(""))

    async def _grow(self, item: _Item, text: str) -> None:
        if item.kind == CALL:
            await self._about(item, f"{_ARGUMENTS}.delta", delta=text)
            return
        logprobs: Json = {"logprobs": []} if item.kind == TEXT else {}
        await self._about(item, f"{_KINDS[item.kind]}.delta", content_index=0, delta=text, **logprobs)

    async def _close(self, status: str) -> None:
        """End the item that is open, if there is one."""
        if (item := self._open) is None:
            return
        kind, fields = item.done()
        await self._about(item, kind, **fields)
        if item.kind != CALL:
            await self._about(item, "response.content_part.done", content_index=0, part=item.part(item.text))
        await self._send("response.output_item.done", output_index=item.index, item=item.to_json(status))
        self._open = None

    async def _about(self, item: _Item, kind: str, **fields: object) -> None:
        await self._send(kind, item_id=item.item_id, output_index=item.index, **fields)

    async def _send_response(self, kind: str, body: bytes) -> None:
        await self._send_encoded(kind, b'{"response":' + body + b"}")

    async def _send(self, kind: str, **fields: object) -> None:
        await self._send_encoded(kind, to_json(fields))

    async def _send_encoded(self, kind: str, fields: bytes) -> None:
        head = to_json({"type": kind, "sequence_number": self._num_events})
        self._num_events += 1
        await self._exchange.encoded_event(_joined(head, fields), name=kind)


def item_response(
    asked: Asked, request: RequestContext, header: Header, generation: Generation, lengths: Sequence[int]
) -> Response:
    """What sends the response."""
    items = _Items(request, header, asked)
    return StreamedItems(request, items) if generation.stream else FullItems(request, items)


def _joined(*objects: bytes) -> bytes:
    """One JSON object with the fields of these."""
    return b"{" + b",".join(one[1:-1] for one in objects if len(one) > len(b"{}")) + b"}"


def encoded(conversation: Sequence[Json]) -> bytes:
    """A conversation to be kept. It has a message at least."""
    return json.dumps(conversation, ensure_ascii=False, separators=(",", ":")).encode()
