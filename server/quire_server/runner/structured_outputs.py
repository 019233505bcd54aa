"""Structured outputs: masks the logits of tokens that a request's grammar does not allow next.

A matcher follows ``input_batch.tokens`` by itself: given a context, it rolls back tokens that differ from it
and consumes new ones. So drafts, rejected drafts and preemption need no messages, and a row may occur several
times in a batch with growing lengths. Matchers are built on a thread of the engine
(``engine.grammar_queue``).
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

from quire_server.core.sampling_params import Grammar
from quire_server.core.step import GRAMMAR_TOO_COMPLEX, StartedRow
from quire_server.errors import RequestError
from quire_server.layers.ops import apply_token_bitmask
from quire_server.runner.input_batch import InputBatch
from quire_server.text import grammar as texts

_ALL = np.uint32(0xFFFFFFFF)
_TOKEN_BYTES = np.dtype(np.int64).itemsize
_SEVERAL = 4  # with fewer masks, starting threads (15 us) costs more than it saves
_NOT_ALLOWED = "The tokens so far are not what the grammar allows."


class GrammarMatcher:
    """A grammar and the output tokens that it has consumed."""

    def __init__(self, library: LLMatcher) -> None:
        self.library = library
        self._consumed = b""  # as int64

    @property
    def is_lost(self) -> bool:
        """Whether the matcher failed for good: the grammar turned out to be too complex."""
        return self.library.is_error()

    @property
    def may_end(self) -> bool:
        """Whether the consumed tokens are a complete output."""
        return self.library.is_accepting()

    def follow(self, context: NDArray[np.int64]) -> bool:
        """Roll back and consume until exactly these tokens are consumed; False if the grammar does not allow
        them.
        """
        wanted, known = context.tobytes(), len(self._consumed) // _TOKEN_BYTES
        if not wanted.startswith(self._consumed):
            common = _common(np.frombuffer(self._consumed, np.int64), context)
            self.library.rollback(known - common)
            known = common
        known += self.library.try_consume_tokens(context[known:].tolist())
        self._consumed = wanted[: known * _TOKEN_BYTES]
        return known == len(context)


class Grammars:
    """The matchers of running requests, by request id."""

    def __init__(self, load_vocabulary: Callable[[], texts.Vocabulary]) -> None:
        self._load_vocabulary = load_vocabulary
        self._loading = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._matchers: dict[str, GrammarMatcher] = {}
        self._threads: LLExecutor | None = None

    def build(self, grammar: Grammar) -> GrammarMatcher:
        """Compile a grammar, on any thread; the first call loads the vocabulary. Raises RequestError."""
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = self._load_vocabulary().tokenizer()
                if (num_threads := torch.get_num_threads()) > 1:
                    self._threads = LLExecutor(num_threads)
        try:
            return GrammarMatcher(texts.matcher(self._tokenizer, grammar.text))
        except texts.GrammarError as error:
            raise RequestError(f"The {grammar.kind} cannot be followed: {error}") from None

    def admit(self, request_id: str, matcher: GrammarMatcher) -> None:
        """Register a request's matcher before its first step."""
        self._matchers[request_id] = matcher

    def forget(self, request_id: str) -> None:
        """Drop a request's matcher, if it has one."""
        self._matchers.pop(request_id, None)

    def constrain(
        self,
        logits: Tensor,
        input_batch: InputBatch,
        row_ids: NDArray[np.int64],
        lengths: NDArray[np.int64],
        eos_ids: Iterable[int],
        upload: Callable[[NDArray[Any]], Tensor] = torch.from_numpy,
    ) -> dict[int, str]:
        """Set the logits [S, V] of tokens that a grammar forbids to -inf; returns failures by position.

        There is one entry per sampled position; the entries of a row have growing ``lengths``. From the first
        failure of a row on everything is allowed: a later context may contain a draft that the grammar
        forbids, and such a draft is rejected anyway. ``upload`` copies an array to the logits' device.
        """
        if not self._matchers:
            return {}
        entries = np.flatnonzero(input_batch.has_grammar[row_ids])
        failures: dict[int, str] = {}
        masks = np.full((len(entries), -(-logits.shape[1] // 32)), _ALL, np.uint32)
        lost: set[int] = set()
        for places in _by_occurrence(row_ids[entries].tolist()):
            following: list[tuple[int, GrammarMatcher]] = []
            for place in places:
                index = int(entries[place])
                if (row := int(row_ids[index])) in lost:
                    continue
                matcher, why = self._followed(input_batch, row, int(lengths[index]))
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
                    _offer_end(masks[place], matcher, input_batch.started[row], int(lengths[index]), eos_ids)
        apply_token_bitmask(logits, upload(masks.view(np.int32)), upload(entries), out=logits)
        return failures

    def _followed(self, input_batch: InputBatch, row: int, length: int) -> tuple[GrammarMatcher | None, str]:
        """The row's matcher after it consumed the row's context, or (None, why it could not)."""
        started = input_batch.started[row]
        assert started is not None
        matcher = self._matchers.get(started.request_id)
        if matcher is None:
            return None, "The request has ended."
        if matcher.follow(input_batch.tokens[row, started.num_prompt_tokens : length]):
            return matcher, ""
        return None, GRAMMAR_TOO_COMPLEX if matcher.is_lost else _NOT_ALLOWED

    def _fill(self, masks: NDArray[np.uint32], following: Sequence[tuple[int, GrammarMatcher]]) -> None:
        """Compute the bit masks, one bit per token with the lowest bit of a word first; with threads if there
        are many.
        """
        begin, size = masks.ctypes.data, masks.strides[0]
        if self._threads is None or len(following) < _SEVERAL:
            for place, matcher in following:
                matcher.library.unsafe_compute_mask_ptr(begin + place * size, size)
        else:
            work = [(matcher.library, place) for place, matcher in following]
            self._threads.unsafe_compute_mask_ptr(work, begin, size, len(masks))


def _by_occurrence(rows: Sequence[int]) -> list[list[int]]:
    """Indices of the rows' first entries, then of their second entries, and so on."""
    groups: list[list[int]] = []
    seen: Counter[int] = Counter()
    for place, row in enumerate(rows):
        if seen[row] == len(groups):
            groups.append([])
        groups[seen[row]].append(place)
        seen[row] += 1
    return groups


def _offer_end(
    mask: NDArray[np.uint32],
    matcher: GrammarMatcher,
    started: StartedRow | None,
    length: int,
    eos_ids: Iterable[int],
) -> None:
    """Allow tokens that end the output where the grammar may end, and nowhere else; before min_tokens only
    where the grammar has no other token.
    """
    assert started is not None
    sampling = started.sampling
    is_early = length < started.num_prompt_tokens + sampling.min_tokens
    if not sampling.stop_token_ids and not is_early:
        return  # the library's mask is right: it knows the model's EOS tokens
    ends = np.array(sorted({*eos_ids, *sampling.stop_token_ids}), np.int64)
    ends = ends[ends < 32 * len(mask)]
    words, bits = ends // 32, np.uint32(1) << (ends % 32).astype(np.uint32)
    np.bitwise_and.at(mask, words, ~bits)
    if matcher.may_end and not (is_early and mask.any()):
        np.bitwise_or.at(mask, words, bits)


def _common(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """Length of the longest common prefix."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if differing.size else length
