"""OpenAI's response shapes, to the letter: clients break on an empty string where a null should be.

Called by `completions`. One class per route turns pieces into chunks and into the whole response; dicts
leave here and nowhere else. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quire_server import __version__
from quire_server.api.generation import Piece
from quire_server.core.step import TokenLogprobs
from quire_server.text.tokenizer import Tokenizer

Json = dict[str, object]
FINGERPRINT = f"quire-{__version__}"


@dataclass(frozen=True)
class Usage:
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def to_json(self) -> Json:
        """The usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Answer:
    """One answer as it grows."""

    def __init__(self, lead: str = "") -> None:
        self.text = lead
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.token_ms: list[float] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    def add(self, piece: Piece) -> None:
        """Take in what the answer gained."""
        self.text += piece.text
        self.logprobs += piece.logprobs
        self.prompt_logprobs += piece.prompt_logprobs
        self.token_ms += piece.token_ms
        self.finish_reason = piece.finish_reason
        self.stop_reason = piece.stop_reason

    def ending(self) -> Json:
        """Why it ended, and when; what is not OpenAI's only where it says something."""
        ending: Json = {"finish_reason": self.finish_reason}
        if self.stop_reason is not None:
            ending["stop_reason"] = self.stop_reason
        return ending | token_timing(self.token_ms) if self.token_ms else ending


def token_timing(token_ms: list[float]) -> Json:
    """When each token came, since the request's arrival. Not OpenAI's: their clients pass over it."""
    return {"quire_timing": {"token_ms": token_ms}}


class Shape(Protocol):
    """How a route writes its responses."""

    def opening(self, index: int) -> list[Json]:
        """Choices of the chunks that an answer begins with."""

    def delta(self, index: int, text: str, logprobs: list[TokenLogprobs]) -> Json:
        """The choice of a chunk in between."""

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
class ChatShape:
    """/v1/chat/completions."""

    header: Header
    tokenizer: Tokenizer
    with_logprobs: bool
    with_prompt_logprobs: bool = False

    def opening(self, index: int) -> list[Json]:
        """The role comes first, alone."""
        return [_chunk_choice(index, {"role": "assistant", "content": ""})]

    def delta(self, index: int, text: str, logprobs: list[TokenLogprobs]) -> Json:
        """Text."""
        return {**_chunk_choice(index, {"content": text}), "logprobs": self._logprobs(logprobs)}

    def closing(self, index: int, finish_reason: str) -> Json:
        """An empty delta."""
        return {**_chunk_choice(index, {}), "finish_reason": finish_reason}

    def choice(self, index: int, answer: Answer) -> Json:
        """A whole message."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": self._logprobs(answer.logprobs),
            **answer.ending(),
        }

    def whole(self, answers: Sequence[Answer]) -> Json:
        """vLLM's prompt_logprobs stand beside the choices."""
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


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for a token that cannot come."""
    return max(logprob, -9999.0)


def _prompt_logprobs(told: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> list[Json | None]:
    """vLLM's: null for the first token, then by token id. Only the likeliest ones have a rank."""

    def entry(token_id: int, logprob: float, rank: int | None) -> Json:
        text = tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": text}

    positions: list[Json | None] = [None]
    for one in told:
        ranked: Json = {str(token): entry(token, value, i) for i, (token, value) in enumerate(one.top, 1)}
        positions.append({str(one.token_id): entry(one.token_id, one.logprob, None), **ranked})
    return positions


def _chunk_choice(index: int, delta: Json) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


class CompletionShape:
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

    def delta(self, index: int, text: str, logprobs: list[TokenLogprobs]) -> Json:
        """Text."""
        return self._choice(index, text, self._logprobs(index, logprobs), None)

    def closing(self, index: int, finish_reason: str) -> Json:
        """No text."""
        return self._choice(index, "", None, finish_reason)

    def choice(self, index: int, answer: Answer) -> Json:
        """A whole text."""
        told, first = answer.logprobs, None
        if self._scored:
            told, first = answer.prompt_logprobs + told, self._scored[index][0]
        choice = self._choice(index, answer.text, self._logprobs(index, told, first), None) | answer.ending()
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
        """``first``: a token before the others of which there is nothing to tell."""
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
