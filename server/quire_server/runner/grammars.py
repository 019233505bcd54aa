"""Which tokens a request's grammar allows next, as masks over logits. Called by ``model_runner`` in every
step and by the engine, which has matchers built on a thread (``engine.grammar_room``).

A matcher follows ``rows.tokens`` by itself: asked about a length, it takes back what differs from the context
and consumes what is new. So drafts, rejected drafts and preemption need no messages, and a row may occur
several times in a batch, with growing lengths.
"""

import threading
from collections.abc import Callable, Iterable

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray
from torch import Tensor

from quire_server.core.errors import RequestError
from quire_server.core.request import Grammar
from quire_server.core.step import GRAMMAR_TOO_COMPLEX, StartedRow
from quire_server.runner.rows import Rows
from quire_server.text import grammar as texts


class Matcher:
    """A grammar and the generated tokens that it has consumed."""

    def __init__(self, library: LLMatcher) -> None:
        self._library = library
        self._consumed = np.empty(0, np.int64)

    @property
    def is_lost(self) -> bool:
        """Whether nothing can be said any more: the grammar turned out to be too complex."""
        return self._library.is_error()

    @property
    def may_end(self) -> bool:
        """Whether the consumed tokens are a whole answer."""
        return self._library.is_accepting()

    def follow(self, context: NDArray[np.int64]) -> bool:
        """Have consumed exactly these tokens; False where the grammar does not allow them."""
        common = _common(self._consumed, context)
        if common < len(self._consumed):
            self._library.rollback(len(self._consumed) - common)
        consumed = self._library.try_consume_tokens(context[common:].tolist())
        self._consumed = context[: common + consumed].copy()
        return len(self._consumed) == len(context)

    def fill(self, mask: NDArray[np.uint32]) -> None:
        """One bit for each token, the lowest bit of a word first."""
        self._library.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)


class Grammars:
    """The matchers of the requests that the engine works on, by request id."""

    def __init__(self, load_vocabulary: Callable[[], texts.Vocabulary]) -> None:
        self._load_vocabulary = load_vocabulary
        self._loading = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._matchers: dict[str, Matcher] = {}

    def build(self, grammar: Grammar) -> Matcher:
        """For any thread; the first one loads the vocabulary. Raises RequestError."""
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = self._load_vocabulary().tokenizer()
        try:
            return Matcher(texts.matcher(self._tokenizer, grammar.text))
        except texts.GrammarError as error:
            raise RequestError(f"The {grammar.kind} cannot be followed: {error}") from None

    def admit(self, request_id: str, matcher: Matcher) -> None:
        """Before the request's first step."""
        self._matchers[request_id] = matcher

    def forget(self, request_id: str) -> None:
        """The request has ended, if it was there at all."""
        self._matchers.pop(request_id, None)

    def constrain(
        self,
        logits: Tensor,
        rows: Rows,
        row_ids: NDArray[np.int64],
        lengths: NDArray[np.int64],
        eos_ids: Iterable[int],
    ) -> dict[int, str]:
        """Set the logits [S, V] of what a grammar forbids to -inf; returns failures by position.

        One entry for each sampled position; the entries of a row have growing ``lengths``. Where there is a
        failure, and behind it, everything is allowed: a later entry's context may be a draft that the grammar
        forbids, and that is going to be rejected.
        """
        if not self._matchers:
            return {}
        entries = np.flatnonzero(rows.has_grammar[row_ids])
        failures: dict[int, str] = {}
        masks = np.full((len(entries), -(-logits.shape[1] // 32)), 0xFFFFFFFF, np.uint32)
        lost: set[int] = set()
        for mask, index in zip(masks, entries, strict=True):
            row = int(row_ids[index])
            if row not in lost and (why := self._fill(mask, rows, row, int(lengths[index]), eos_ids)):
                failures[int(index)] = why
                lost.add(row)
            if row in lost:
                mask[:] = 0xFFFFFFFF
        _apply(logits, entries, masks)
        return failures

    def _fill(
        self, mask: NDArray[np.uint32], rows: Rows, row: int, length: int, eos_ids: Iterable[int]
    ) -> str:
        """Why it could not be done, or nothing."""
        started = rows.started[row]
        assert started is not None
        matcher = self._matchers.get(started.request_id)
        if matcher is None:
            return "The request has ended."
        follows = matcher.follow(rows.tokens[row, started.num_prompt_tokens : length])
        if follows:
            matcher.fill(mask)
        if matcher.is_lost:
            return GRAMMAR_TOO_COMPLEX
        if not follows:
            return "The tokens so far are not what the grammar allows."
        _offer_end(mask, matcher, started, length, eos_ids)
        return ""


def _offer_end(
    mask: NDArray[np.uint32], matcher: Matcher, started: StartedRow, length: int, eos_ids: Iterable[int]
) -> None:
    """A token that ends the answer is allowed where the grammar may end, and nowhere else; before min_tokens
    only where the grammar cannot go on.
    """
    sampling = started.sampling
    is_early = length < started.num_prompt_tokens + sampling.min_tokens
    if not sampling.stop_token_ids and not is_early:
        return  # the library has said it: it knows the model's own end tokens
    ends = np.array(sorted({*eos_ids, *sampling.stop_token_ids}), np.int64)
    ends = ends[ends < 32 * len(mask)]
    words, bits = ends // 32, np.uint32(1) << (ends % 32).astype(np.uint32)
    np.bitwise_and.at(mask, words, ~bits)
    if matcher.may_end and not (is_early and mask.any()):
        np.bitwise_or.at(mask, words, bits)


def _apply(logits: Tensor, entries: NDArray[np.int64], masks: NDArray[np.uint32]) -> None:
    bits = np.unpackbits(~masks.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    forbidden = torch.from_numpy(bits.view(np.bool_)).to(logits.device)
    if len(entries) == len(logits):
        logits.masked_fill_(forbidden, float("-inf"))
    else:
        chosen = torch.from_numpy(entries).to(logits.device)
        logits[chosen] = logits[chosen].masked_fill(forbidden, float("-inf"))


def _common(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """Length of the longest beginning of both."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if differing.size else length
