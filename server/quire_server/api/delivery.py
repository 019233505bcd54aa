"""The two ways in which an answer reaches its client: piece by piece, or whole.

Called by `completions`. Both are fed the same pieces; only here is decided what becomes a chunk.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from json.encoder import encode_basestring

from quire_server.api.generation import Piece
from quire_server.api.reply import Reply, to_json
from quire_server.api.shapes import Answer, Json, Shape, Usage, token_timing
from quire_server.core.step import TokenLogprobs

#: Where the text goes in a chunk that is encoded beforehand. Nothing else there can hold a NUL.
_PLACE = "\0"


class Tally:
    """Token counts over all answers of a request."""

    def __init__(self) -> None:
        self.completion_tokens = 0
        self._cached: dict[int, int] = {}
        self.finish_reasons: dict[int, str] = {}  # of the answers that have ended

    def count(self, piece: Piece) -> None:
        """Take in a piece."""
        self.completion_tokens += piece.num_tokens
        if piece.num_cached_tokens:
            self._cached[piece.answer] = max(self._cached.get(piece.answer, 0), piece.num_cached_tokens)
        if piece.finish_reason is not None:
            self.finish_reasons[piece.answer] = piece.finish_reason

    def cached_tokens(self, prompt_tokens: int) -> int:
        """n answers share one prompt, so no more of it is cached than there is."""
        return min(sum(self._cached.values()), prompt_tokens)

    def usage(self, prompt_tokens: int) -> Json:
        """The usage object."""
        return Usage(prompt_tokens, self.completion_tokens, self.cached_tokens(prompt_tokens)).to_json()


class Whole:
    """One JSON body at the end."""

    def __init__(self, reply: Reply, shape: Shape, leads: tuple[str, ...]) -> None:
        self._reply = reply
        self._shape = shape
        self._answers = [Answer(lead) for lead in leads]
        self.tally = Tally()

    async def add(self, piece: Piece) -> None:
        """Keep a piece."""
        self.tally.count(piece)
        self._answers[piece.answer].add(piece)

    async def finish(self, prompt_tokens: int) -> None:
        """Send everything."""
        body = self._shape.whole(self._answers)
        await self._reply.json({**body, "usage": self.tally.usage(prompt_tokens)})


class Streamed:
    """Server-sent events, one for each piece that has text.

    ``counting``: the prompt tokens of each answer, where every chunk shall tell its answer's usage so far
    (vLLM's continuous_usage_stats); else nothing.
    """

    def __init__(
        self,
        reply: Reply,
        shape: Shape,
        num_answers: int,
        *,
        include_usage: bool,
        counting: Sequence[int] = (),
    ) -> None:
        self._reply = reply
        self._shape = shape
        self._unopened = set(range(num_answers))
        self._held: dict[int, list[TokenLogprobs]] = defaultdict(list)
        self._times: dict[int, list[float]] = defaultdict(list)
        self._frames: dict[int, list[bytes]] = {}
        self._include_usage = include_usage
        self._counting = counting
        self._counts: Counter[int] = Counter()  # completion tokens of each answer, where they are told
        self.tally = Tally()

    async def add(self, piece: Piece) -> None:
        """Send what the piece brings; log-probabilities wait for the text of their tokens."""
        self.tally.count(piece)
        if piece.answer in self._unopened:
            self._unopened.discard(piece.answer)
            for choice in self._shape.opening(piece.answer):
                await self._send([choice], self._usage(piece.answer))
        if self._counting:
            self._counts[piece.answer] += piece.num_tokens
        held = self._held[piece.answer]
        held += piece.logprobs
        times = self._times[piece.answer]
        times += piece.token_ms
        if piece.text and not (held or times):
            await self._reply.encoded_event(self._text_chunk(piece.answer, piece.text))
        elif piece.text or ((held or times) and piece.finish_reason is not None):
            choice = self._shape.delta(piece.answer, piece.text, held)
            if times:
                choice |= token_timing(times)
            self._held[piece.answer], self._times[piece.answer] = [], []
            await self._send([choice], self._usage(piece.answer))
        if piece.finish_reason is not None:
            closing = self._shape.closing(piece.answer, piece.finish_reason)
            if piece.stop_reason is not None:
                closing["stop_reason"] = piece.stop_reason
            await self._send([closing], self._usage(piece.answer))

    async def finish(self, prompt_tokens: int) -> None:
        """Send the usage, if asked for, and the end."""
        if self._include_usage:
            await self._send([], self.tally.usage(prompt_tokens))
        await self._reply.end_stream()

    def _usage(self, index: int) -> Json | None:
        """Of one answer so far."""
        if not self._counting:
            return None
        prompt, completion = self._counting[index], self._counts[index]
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def _text_chunk(self, index: int, text: str) -> bytes:
        """Almost every chunk is one of these, and only the text and the counts differ: the rest is encoded
        once.
        """
        if (frame := self._frames.get(index)) is None:
            usage = _PLACE if self._counting else None
            whole = to_json(self._chunk([self._shape.delta(index, _PLACE, [])], usage))
            frame = self._frames[index] = whole.split(to_json(_PLACE))
        before, after, *end = frame
        told = before + encode_basestring(text).encode() + after
        return told + to_json(self._usage(index)) + end[0] if self._counting else told

    async def _send(self, choices: list[Json], usage: Json | None) -> None:
        await self._reply.event(self._chunk(choices, usage))

    def _chunk(self, choices: list[Json], usage: Json | str | None) -> Json:
        body = {**self._shape.envelope(chunk=True), "choices": choices}
        return {**body, "usage": usage} if self._include_usage else body
