"""Anthropic's messages: an answer as content blocks, whole or as a stream of events.

Dictionaries are built here and nowhere else; tests compare
them with the models of `protocol.message_responses`.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire_http.exchange import HttpExchange, to_json
from quire_server.api.output_pieces import CALL, TEXT, THOUGHT, Piece, pieces
from quire_server.api.output_processor import TOOL_CALLS, OutputDelta
from quire_server.api.protocol.generation import Generation
from quire_server.api.protocol.tools import arguments_of
from quire_server.api.request_context import RequestContext, TokenCounts
from quire_server.api.response_formatter import Header, Response, count, usage

Json = dict[str, object]
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", TOOL_CALLS: "tool_use"}


def _block(piece: Piece) -> Json:
    """A block that begins with a piece, without the piece's text."""
    if piece.kind == TEXT:
        return {"type": "text", "text": ""}
    if piece.kind == THOUGHT:
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": piece.call_id, "name": piece.name, "input": {}}


def _delta(piece: Piece) -> Json:
    """What an open block gains."""
    if piece.kind == TEXT:
        return {"type": "text_delta", "text": piece.text}
    if piece.kind == THOUGHT:
        return {"type": "thinking_delta", "thinking": piece.text}
    return {"type": "input_json_delta", "partial_json": piece.text}


def _message(header: Header, content: list[Json], ending: Json, tokens: Json) -> Json:
    return {
        "id": header.response_id,
        "type": "message",
        "role": "assistant",
        "model": header.model,
        "content": content,
        **ending,
        "usage": tokens,
    }


def _ending(delta: OutputDelta | None) -> Json:
    """Why an answer ended; nothing of one that has not."""
    if delta is None or delta.finish_reason is None:
        return {"stop_reason": None, "stop_sequence": None}
    if delta.finish_reason == "stop" and isinstance(delta.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": delta.stop_reason}
    return {"stop_reason": _STOP_REASONS[delta.finish_reason], "stop_sequence": None}


def _usage(counts: TokenCounts, prompt_tokens: int) -> Json:
    """Anthropic's counts: what was in the prefix cache is no input token."""
    cached = counts.cached_tokens
    return {
        "input_tokens": prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": counts.completion_tokens,
    }


class FullMessage:
    """One JSON body at the end."""

    def __init__(self, exchange: HttpExchange, counts: TokenCounts, header: Header) -> None:
        self._exchange = exchange
        self._counts = counts
        self._header = header
        self._blocks: list[tuple[Piece, list[str]]] = []  # what each began with, and its texts
        self._last: OutputDelta | None = None

    async def add(self, delta: OutputDelta) -> None:
        """Keep a delta."""
        count(self._counts, delta)
        self._last = delta
        for piece in pieces(delta):
            if piece.opens(self._blocks[-1][0].kind if self._blocks else None):
                self._blocks.append((piece, []))
            self._blocks[-1][1].append(piece.text)

    async def finish(self, prompt_tokens: int) -> None:
        """Send everything."""
        content = [_whole(piece, "".join(texts)) for piece, texts in self._blocks]
        tokens = _usage(self._counts, prompt_tokens)
        await self._exchange.json(_message(self._header, content, _ending(self._last), tokens))


def _whole(piece: Piece, text: str) -> Json:
    """A block with all of its text. Arguments that were cut, or are no object, are none."""
    block = _block(piece)
    if piece.kind != CALL:
        return {**block, piece.kind: text}
    return {**block, "input": arguments_of(text) or {}}


class StreamedMessage:
    """Server-sent events, each with the name of its type. ``ends_with_usage``: a comment says the usage in
    the form of completions, for a gateway, which takes it out.
    """

    def __init__(
        self,
        exchange: HttpExchange,
        counts: TokenCounts,
        header: Header,
        prompt_tokens: int,
        *,
        ends_with_usage: bool,
    ) -> None:
        self._exchange = exchange
        self._counts = counts
        self._header = header
        self._prompt_tokens = prompt_tokens
        self._ends_with_usage = ends_with_usage
        self._num_blocks = 0
        self._open: str | None = None  # the kind of the block that is open
        self._last: OutputDelta | None = None

    async def add(self, delta: OutputDelta) -> None:
        """Send the delta."""
        if self._last is None:
            self._counts.add(delta.answer, 0, delta.num_cached_tokens, None)
            tokens = _usage(self._counts, self._prompt_tokens)
            message = _message(self._header, [], _ending(None), tokens)
            await self._send("message_start", message=message)
        count(self._counts, delta)
        self._last = delta
        for piece in pieces(delta):
            if piece.opens(self._open):
                await self._close()
                await self._send("content_block_start", index=self._num_blocks, content_block=_block(piece))
                self._open = piece.kind
            if piece.text:
                await self._send("content_block_delta", index=self._num_blocks, delta=_delta(piece))

    async def finish(self, prompt_tokens: int) -> None:
        """Send why it ended, and the usage."""
        await self._close()
        tokens = _usage(self._counts, prompt_tokens)
        await self._send("message_delta", delta=_ending(self._last), usage=tokens)
        if self._ends_with_usage:
            await self._exchange.comment(b"usage " + to_json(usage(self._counts, prompt_tokens)))
        await self._send("message_stop")
        await self._exchange.end_stream()

    async def _close(self) -> None:
        """End the block that is open, if there is one."""
        if self._open is not None:
            await self._send("content_block_stop", index=self._num_blocks)
            self._num_blocks += 1
            self._open = None

    async def _send(self, kind: str, **fields: object) -> None:
        await self._exchange.encoded_event(to_json({"type": kind, **fields}), name=kind)


def message_response(
    request: RequestContext, header: Header, generation: Generation, lengths: Sequence[int]
) -> Response:
    """What sends the answer. ``lengths``: of its one prompt, in tokens."""
    if not generation.stream:
        return FullMessage(request.exchange, request.counts, header)
    return StreamedMessage(
        request.exchange, request.counts, header, lengths[0], ends_with_usage=request.ends_with_usage
    )
