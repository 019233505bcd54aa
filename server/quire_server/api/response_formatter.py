"""OpenAI's responses, to the letter: clients break on an empty string where a null should be.

A formatter for each route turns output deltas into chunks and into the full response; the two responses at
the end of the file send them, streamed or as one body. Dictionaries are built here and nowhere else, and
written without the models of `protocol.responses`, for speed; tests compare the two.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Protocol

from quire_http.exchange import HttpExchange, to_json
from quire_server import __version__
from quire_server.api.answer_parser import CallDelta
from quire_server.api.output_processor import OutputDelta
from quire_server.api.request_context import TokenCounts
from quire_server.core.step import TokenLogprobs
from quire_server.text.tokenizer import Tokenizer

Json = dict[str, object]
#: Where the text goes in a chunk that is encoded beforehand. Nothing else there can hold a NUL.
_TEXT = "\0"
FINGERPRINT = f"quire-{__version__}"


class Answer:
    """One answer as it grows."""

    def __init__(self, lead: str = "") -> None:
        self.text = lead
        self.reasoning = ""
        self.calls: list[CallDelta] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.token_ms: list[float] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    def add(self, delta: OutputDelta) -> None:
        """Take in what the answer gained."""
        self.text += delta.text
        self.reasoning += delta.reasoning
        for call in delta.calls:
            if call.call_id:
                self.calls.append(call)
            else:
                last = self.calls[-1]
                self.calls[-1] = last._replace(arguments=last.arguments + call.arguments)
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        self.token_ms += delta.token_ms
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason

    def ending(self) -> Json:
        """Why and when it ended; fields that are not OpenAI's only where they are set."""
        ending: Json = {"finish_reason": self.finish_reason}
        if self.stop_reason is not None:
            ending["stop_reason"] = self.stop_reason
        return ending | token_timing(self.token_ms) if self.token_ms else ending


def token_timing(token_ms: list[float]) -> Json:
    """When each token came, since the request's arrival. Not OpenAI's: their clients ignore it."""
    return {"quire_timing": {"token_ms": token_ms}}


class ResponseFormatter(Protocol):
    """How a route writes its responses."""

    def opening(self, index: int) -> list[Json]:
        """Choices of the chunks that an answer begins with."""

    def delta(self, delta: OutputDelta, logprobs: list[TokenLogprobs]) -> Json:
        """The choice of a chunk in between. All that tokens add is in one chunk: where a stream is cut, a
        client has all of it or nothing, and another server goes on from there.
        """

    def closing(self, index: int, finish_reason: str) -> Json:
        """The choice of an answer's last chunk: no text, only the reason."""

    def whole(self, answers: Sequence[Answer]) -> Json:
        """The whole response, but for its usage."""

    def envelope(self, *, chunk: bool) -> Json:
        """What all bodies of one response share."""


@dataclass(frozen=True)
class Header:
    """Identity of one response."""

    response_id: str
    created: int
    model: str

    def to_json(self, kind: str) -> Json:
        """The fields in the order in which OpenAI writes them."""
        return {
            "id": self.response_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }


@dataclass(frozen=True)
class ChatFormatter:
    """/v1/chat/completions."""

    header: Header
    tokenizer: Tokenizer
    with_logprobs: bool
    with_prompt_logprobs: bool = False

    def opening(self, index: int) -> list[Json]:
        """The role comes first, alone."""
        return [_chunk_choice(index, {"role": "assistant", "content": ""})]

    def delta(self, delta: OutputDelta, logprobs: list[TokenLogprobs]) -> Json:
        """Text, a thought and calls."""
        choice = _chunk_choice(delta.answer, _message_delta(delta))
        return {**choice, "logprobs": self._logprobs(logprobs)}

    def closing(self, index: int, finish_reason: str) -> Json:
        """An empty delta."""
        return {**_chunk_choice(index, {}), "finish_reason": finish_reason}

    def choice(self, index: int, answer: Answer) -> Json:
        """A whole message."""
        message: Json = {"role": "assistant", "content": answer.text or (None if answer.calls else "")}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [_call(call) for call in answer.calls]
        return {
            "index": index,
            "message": {**message, "refusal": None},
            "logprobs": self._logprobs(answer.logprobs),
            **answer.ending(),
        }

    def whole(self, answers: Sequence[Answer]) -> Json:
        """vLLM's prompt_logprobs are beside the choices."""
        body = self.envelope(chunk=False)
        body["choices"] = [self.choice(index, answer) for index, answer in enumerate(answers)]
        if self.with_prompt_logprobs:
            body["prompt_logprobs"] = _prompt_logprobs(answers[0].prompt_logprobs, self.tokenizer)
        return body

    def envelope(self, *, chunk: bool) -> Json:
        """The body without choices."""
        return self.header.to_json("chat.completion.chunk" if chunk else "chat.completion")

    def _logprobs(self, logprobs: list[TokenLogprobs]) -> Json | None:
        if not self.with_logprobs:
            return None
        return {"content": [self._token(one) for one in logprobs], "refusal": None}

    def _token(self, one: TokenLogprobs) -> Json:
        top = [self._entry(token_id, logprob) for token_id, logprob in one.top]
        return {**self._entry(one.token_id, one.logprob), "top_logprobs": top}

    def _entry(self, token_id: int, logprob: float) -> Json:
        raw = self.tokenizer.token_bytes(token_id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(raw)}


def _call(call: CallDelta) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def _message_delta(delta: OutputDelta) -> Json:
    message: Json = {"reasoning_content": delta.reasoning} if delta.reasoning else {}
    if delta.calls:
        message["tool_calls"] = _call_deltas(delta.calls)
    if delta.text or not message:
        message["content"] = delta.text
    return message


def _call_deltas(calls: Sequence[CallDelta]) -> list[Json]:
    """One entry for each call: its name, if it begins, and the arguments that it gained."""
    gained: dict[int, list[CallDelta]] = {}
    for call in calls:
        gained.setdefault(call.number, []).append(call)
    return [_call_delta(number, *pieces) for number, pieces in gained.items()]


def _call_delta(number: int, first: CallDelta, *more: CallDelta) -> Json:
    call = first._replace(arguments="".join([first.arguments, *(one.arguments for one in more)]))
    if call.call_id:
        return {"index": number, **_call(call)}
    return {"index": number, "function": {"arguments": call.arguments}}


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for a token that cannot come."""
    return max(logprob, -9999.0)


def _prompt_logprobs(prompt: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> list[Json | None]:
    """vLLM's: null for the first token, then by token id. Only the likeliest ones have a rank."""

    def entry(token_id: int, logprob: float, rank: int | None) -> Json:
        text = tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": text}

    positions: list[Json | None] = [None]
    for one in prompt:
        ranked: Json = {str(token): entry(token, value, i) for i, (token, value) in enumerate(one.top, 1)}
        positions.append({str(one.token_id): entry(one.token_id, one.logprob, None), **ranked})
    return positions


def _chunk_choice(index: int, delta: Json) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


class CompletionFormatter:
    """/v1/completions. Remembers how much text each answer has, for `text_offset`."""

    def __init__(
        self,
        header: Header,
        tokenizer: Tokenizer,
        *,
        with_logprobs: bool,
        leads: tuple[str, ...],
        scored: Sequence[tuple[int, ...]] = (),
        with_prompt_logprobs: bool = False,
    ) -> None:
        self._header = header
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        self._leads = leads  # what each answer begins with: its prompt where echo was asked for
        self._scored = scored  # the echoed prompts, where log-probabilities begin with theirs
        self._offsets = [0 if scored else len(lead) for lead in leads]
        self._with_prompt_logprobs = with_prompt_logprobs

    def opening(self, index: int) -> list[Json]:
        """The echoed prompt, if any."""
        lead = self._leads[index]
        return [self._choice(index, lead, None, None)] if lead else []

    def delta(self, delta: OutputDelta, logprobs: list[TokenLogprobs]) -> Json:
        """Completions are not parsed: they have text alone."""
        return self._choice(delta.answer, delta.text, self._logprobs(delta.answer, logprobs), None)

    def closing(self, index: int, finish_reason: str) -> Json:
        """No text."""
        return self._choice(index, "", None, finish_reason)

    def choice(self, index: int, answer: Answer) -> Json:
        """A whole text."""
        logprobs, first = answer.logprobs, None
        if self._scored:
            logprobs, first = answer.prompt_logprobs + logprobs, self._scored[index][0]
        choice = (
            self._choice(index, answer.text, self._logprobs(index, logprobs, first), None) | answer.ending()
        )
        if self._with_prompt_logprobs:
            choice["prompt_logprobs"] = _prompt_logprobs(answer.prompt_logprobs, self._tokenizer)
        return choice

    def whole(self, answers: Sequence[Answer]) -> Json:
        """The choices are all there is."""
        choices = [self.choice(index, answer) for index, answer in enumerate(answers)]
        return {**self.envelope(chunk=False), "choices": choices}

    def envelope(self, *, chunk: bool) -> Json:
        """The body without choices; chunks are called the same."""
        return self._header.to_json("text_completion")

    def _choice(self, index: int, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, index: int, logprobs: list[TokenLogprobs], first: int | None = None) -> Json | None:
        """``first``: a token before the others that has no log-probability."""
        if not self._with_logprobs:
            return None
        unknown = [] if first is None else [first]
        tokens: list[str] = [self._name(token) for token in (*unknown, *(one.token_id for one in logprobs))]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [*(None for _ in unknown), *(_finite(one.logprob) for one in logprobs)],
            "top_logprobs": [*(None for _ in unknown), *map(self._top, logprobs)],
            "text_offset": offsets,
        }

    def _top(self, one: TokenLogprobs) -> Json:
        """By text: of two tokens that read the same the likelier counts. The token itself is always there."""
        top: Json = {}
        for token, value in (*one.top, (one.token_id, one.logprob)):
            top.setdefault(self._name(token), _finite(value))
        return top

    def _name(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def count(counts: TokenCounts, delta: OutputDelta) -> None:
    counts.add(delta.answer, delta.num_tokens, delta.num_cached_tokens, delta.finish_reason)


def usage(counts: TokenCounts, prompt_tokens: int) -> Json:
    """The usage object of the whole request."""
    counted: Json = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": counts.completion_tokens,
        "total_tokens": prompt_tokens + counts.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": counts.cached_tokens},
    }
    if counts.reasoning_tokens:
        counted["completion_tokens_details"] = {"reasoning_tokens": counts.reasoning_tokens}
    return counted


class Response(Protocol):
    """What sends the answers of one request."""

    async def add(self, delta: OutputDelta) -> None:
        """What an answer gained."""

    async def finish(self, prompt_tokens: int) -> None:
        """All answers have ended."""


class FullResponse:
    """One JSON body at the end."""

    def __init__(
        self,
        exchange: HttpExchange,
        counts: TokenCounts,
        formatter: ResponseFormatter,
        leads: tuple[str, ...],
    ) -> None:
        self._exchange = exchange
        self._token_counts = counts
        self._formatter = formatter
        self._answers = [Answer(lead) for lead in leads]

    async def add(self, delta: OutputDelta) -> None:
        """Keep a delta."""
        count(self._token_counts, delta)
        self._answers[delta.answer].add(delta)

    async def finish(self, prompt_tokens: int) -> None:
        """Send everything."""
        body = self._formatter.whole(self._answers)
        await self._exchange.json({**body, "usage": usage(self._token_counts, prompt_tokens)})


class StreamedResponse:
    """Server-sent events, one for each delta that has text.

    ``counting``: the prompt tokens of each answer, where every chunk has the usage of its answer so
    far (vLLM's continuous_usage_stats); else nothing. ``num_resumed``: tokens that the one answer has
    already. For a gateway, which takes the comments out:
    ``ends_with_usage``: one says the usage at the end; ``names_tokens``: one in each event says which tokens
    came since the event before.
    """

    def __init__(
        self,
        exchange: HttpExchange,
        counts: TokenCounts,
        formatter: ResponseFormatter,
        num_answers: int,
        *,
        include_usage: bool,
        counting: Sequence[int] = (),
        num_resumed: int = 0,
        ends_with_usage: bool = False,
        names_tokens: bool = False,
    ) -> None:
        self._exchange = exchange
        self._token_counts = counts
        self._formatter = formatter
        self._ends_with_usage = ends_with_usage
        self._names_tokens = names_tokens
        self._token_ids: list[int] = []  # that no event has named yet
        self._unopened = set(range(num_answers))
        self._held: dict[int, list[TokenLogprobs]] = defaultdict(list)
        self._times: dict[int, list[float]] = defaultdict(list)
        self._frames: dict[int, list[bytes]] = {}
        self._include_usage = include_usage
        self._counting = counting
        # Completion tokens of each answer, where chunks have them.
        self._counts: Counter[int] = Counter({0: num_resumed})

    async def add(self, delta: OutputDelta) -> None:
        """Send the delta; log-probabilities wait for the text of their tokens."""
        count(self._token_counts, delta)
        if delta.answer in self._unopened:
            self._unopened.discard(delta.answer)
            for choice in self._formatter.opening(delta.answer):
                await self._send([choice], self._usage(delta.answer))
        if self._counting:
            self._counts[delta.answer] += delta.num_tokens
        if self._names_tokens:
            self._token_ids += delta.token_ids
        held = self._held[delta.answer]
        held += delta.logprobs
        times = self._times[delta.answer]
        times += delta.token_ms
        is_parsed = bool(delta.reasoning or delta.calls)
        if delta.text and not (is_parsed or held or times):
            await self._exchange.encoded_event(self._text_chunk(delta.answer, delta.text), self._tokens())
        elif delta.text or is_parsed or ((held or times) and delta.finish_reason is not None):
            choice = self._formatter.delta(delta, held)
            if times:
                choice |= token_timing(times)
            self._held[delta.answer], self._times[delta.answer] = [], []
            await self._send([choice], self._usage(delta.answer))
        if delta.finish_reason is not None:
            closing = self._formatter.closing(delta.answer, delta.finish_reason)
            if delta.stop_reason is not None:
                closing["stop_reason"] = delta.stop_reason
            await self._send([closing], self._usage(delta.answer))

    async def finish(self, prompt_tokens: int) -> None:
        """Send the usage, if asked for, and the end."""
        if self._include_usage:
            await self._send([], usage(self._token_counts, prompt_tokens))
        if self._ends_with_usage:
            await self._exchange.comment(b"usage " + to_json(usage(self._token_counts, prompt_tokens)))
        await self._exchange.end_stream()

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
            usage = _TEXT if self._counting else None
            text_delta = OutputDelta(index, _TEXT, (), 0, 0, None)
            whole = to_json(self._chunk([self._formatter.delta(text_delta, [])], usage))
            frame = self._frames[index] = whole.split(to_json(_TEXT))
        before, after, *end = frame
        chunk = before + encode_basestring(text).encode() + after
        return chunk + to_json(self._usage(index)) + end[0] if self._counting else chunk

    async def _send(self, choices: list[Json], usage: Json | None) -> None:
        await self._exchange.encoded_event(to_json(self._chunk(choices, usage)), self._tokens())

    def _tokens(self) -> bytes:
        """The comment of an event, empty where no token came since the last one."""
        if not self._token_ids:
            return b""
        named = b"tokens " + ",".join(map(str, self._token_ids)).encode()
        self._token_ids = []
        return named

    def _chunk(self, choices: list[Json], usage: Json | str | None) -> Json:
        body = {**self._formatter.envelope(chunk=True), "choices": choices}
        return {**body, "usage": usage} if self._include_usage else body
