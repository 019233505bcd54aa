"""Which tokens a request's grammar allows next, as masks over logits. Called by ``model_runner`` in every
step and by the engine, which has matchers built on a thread (``engine.grammar_room``).

A matcher follows ``rows.tokens`` by itself: asked about a length, it takes back what differs from the context
and consumes what is new. So drafts, rejected drafts and preemption need no messages, and a row may occur
several times in a batch, with growing lengths.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from numpy.typing import NDArray
from torch import Tensor

from quire_server.core.errors import RequestError
from quire_server.core.request import Grammar
from quire_server.core.step import GRAMMAR_TOO_COMPLEX, StartedRow
from quire_server.layers.sampling import apply_token_bitmask
from quire_server.runner.rows import Rows
from quire_server.text import grammar as texts

_ALL = np.uint32(0xFFFFFFFF)
_TOKEN_BYTES = np.dtype(np.int64).itemsize
_SEVERAL = 4  # masks from which on threads are worth their start, some 15 us
_NOT_ALLOWED = "The tokens so far are not what the grammar allows."


class Matcher:
    """A grammar and the generated tokens that it has consumed."""

    def __init__(self, library: LLMatcher) -> None:
        self.library = library
        self._consumed = b""  # as int64

    @property
    def is_lost(self) -> bool:
        """Whether nothing can be said any more: the grammar turned out to be too complex."""
        return self.library.is_error()

    @property
    def may_end(self) -> bool:
        """Whether the consumed tokens are a whole answer."""
        return self.library.is_accepting()

    def follow(self, context: NDArray[np.int64]) -> bool:
        """Have consumed exactly these tokens; False where the grammar does not allow them."""
        wanted, known = context.tobytes(), len(self._consumed) // _TOKEN_BYTES
        if not wanted.startswith(self._consumed):
            common = _common(np.frombuffer(self._consumed, np.int64), context)
            self.library.rollback(known - common)
            known = common
        known += self.library.try_consume_tokens(context[known:].tolist())
        self._consumed = wanted[: known * _TOKEN_BYTES]
        return known == len(context)


class Grammars:
    """The matchers of the requests that the engine works on, by request id."""

    def __init__(self, load_vocabulary: Callable[[], texts.Vocabulary]) -> None:
        self._load_vocabulary = load_vocabulary
        self._loading = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._matchers: dict[str, Matcher] = {}
        self._threads: LLExecutor | None = None

    def build(self, grammar: Grammar) -> Matcher:
        """For any thread; the first one loads the vocabulary. Raises RequestError."""
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = self._load_vocabulary().tokenizer()
                if (num_threads := torch.get_num_threads()) > 1:
                    self._threads = LLExecutor(num_threads)
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
        upload: Callable[[NDArray[Any]], Tensor] = torch.from_numpy,
    ) -> dict[int, str]:
        """Set the logits [S, V] of what a grammar forbids to -inf; returns failures by position.

        One entry for each sampled position; the entries of a row have growing ``lengths``. Where there is a
        failure, and behind it, everything is allowed: a later entry's context may be a draft that the grammar
        forbids, and that is going to be rejected. ``upload``: to where the logits are.
        """
        if not self._matchers:
            return {}
        entries = np.flatnonzero(rows.has_grammar[row_ids])
        failures: dict[int, str] = {}
        masks = np.full((len(entries), -(-logits.shape[1] // 32)), _ALL, np.uint32)
        lost: set[int] = set()
        for places in _turns(row_ids[entries].tolist()):
            following: list[tuple[int, Matcher]] = []
            for place in places:
                index = int(entries[place])
                if (row := int(row_ids[index])) in lost:
                    continue
                matcher, why = self._followed(rows, row, int(lengths[index]))
                if matcher is None:
                    failures[index] = why
                    lost.add(row)
                else:
                    following.append((place, matcher))
            self._fill(masks, following)
            for place, matcher in following:
                index = int(entries[place])
                row = int(row_ids[index])
                if matcher.is_lost:
                    failures[index] = GRAMMAR_TOO_COMPLEX
                    lost.add(row)
                    masks[place] = _ALL
                else:
                    _offer_end(masks[place], matcher, rows.started[row], int(lengths[index]), eos_ids)
        apply_token_bitmask(logits, upload(masks.view(np.int32)), upload(entries), out=logits)
        return failures

    def _followed(self, rows: Rows, row: int, length: int) -> tuple[Matcher | None, str]:
        """A row's matcher, having consumed what the row has, or why it could not."""
        started = rows.started[row]
        assert started is not None
        matcher = self._matchers.get(started.request_id)
        if matcher is None:
            return None, "The request has ended."
        if matcher.follow(rows.tokens[row, started.num_prompt_tokens : length]):
            return matcher, ""
        return None, GRAMMAR_TOO_COMPLEX if matcher.is_lost else _NOT_ALLOWED

    def _fill(self, masks: NDArray[np.uint32], following: Sequence[tuple[int, Matcher]]) -> None:
        """One bit for each token, the lowest bit of a word first; on several threads where it pays."""
        begin, size = masks.ctypes.data, masks.strides[0]
        if self._threads is None or len(following) < _SEVERAL:
            for place, matcher in following:
                matcher.library.unsafe_compute_mask_ptr(begin + place * size, size)
        else:
            work = [(matcher.library, place) for place, matcher in following]
            self._threads.unsafe_compute_mask_ptr(work, begin, size, len(masks))


def _turns(rows: Sequence[int]) -> list[list[int]]:
    """Places of the rows' first entries, then of their second ones, and so on."""
    turns: list[list[int]] = []
    seen: Counter[int] = Counter()
    for place, row in enumerate(rows):
        if seen[row] == len(turns):
            turns.append([])
        turns[seen[row]].append(place)
        seen[row] += 1
    return turns


def _offer_end(
    mask: NDArray[np.uint32],
    matcher: Matcher,
    started: StartedRow | None,
    length: int,
    eos_ids: Iterable[int],
) -> None:
    """A token that ends the answer is allowed where the grammar may end, and nowhere else; before min_tokens
    only where the grammar cannot go on.
    """
    assert started is not None
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


def _common(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """Length of the longest beginning of both."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if differing.size else length
