"""A client's schema, expression or grammar -> what the engine takes, or an error that names the field.

Called by the API process, in a thread. The work is done by a child process (``grammar_worker``) that ends
when it takes too long or too much memory; the results for the texts that are asked most are kept.
"""

import functools
from dataclasses import dataclass

from quire_server.core.errors import RequestError
from quire_server.core.request import Grammar, GrammarKind
from quire_server.text.child import Child
from quire_server.text.grammar import MAX_BYTES, Vocabulary
from quire_server.text.tokenizer import Tokenizer

_KEPT = 64


@dataclass(frozen=True)
class Wanted:
    """What a client asks of an answer. ``param``: the field of the request that said so."""

    kind: GrammarKind
    text: str
    param: str


class GrammarCompiler:
    """Safe to share between threads; one text at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._has_end = bool(tokenizer.eos_token_ids)
        self._tokenizer = tokenizer
        self._compiled: dict[Wanted, Grammar] = {}

    @functools.cached_property
    def _worker(self) -> Child:
        """Only now, since most servers are never asked, and the vocabulary is large."""
        tokenizer = self._tokenizer
        vocabulary = Vocabulary.of(tokenizer, tokenizer.eos_token_ids, tokenizer.vocab_size)
        return Child("quire_server.text.grammar_worker", vocabulary.to_json())

    def known(self, wanted: Wanted) -> Grammar | None:
        """The result of an earlier ``compile`` of the same."""
        return self._compiled.get(wanted)

    def compile(self, wanted: Wanted) -> Grammar:
        """Raises RequestError. Blocks (2 s at worst): an event loop calls it in a thread."""
        if not self._has_end:
            raise self._refusal(wanted, "the model has no token that ends a text")
        if len(wanted.text.encode()) > MAX_BYTES:
            raise self._refusal(wanted, f"is longer than {MAX_BYTES} bytes")
        answer = self._worker.ask({"kind": wanted.kind, "text": wanted.text})
        if "error" in answer:
            raise self._refusal(wanted, answer["error"])
        grammar = Grammar(wanted.kind, answer["text"])
        if len(self._compiled) >= _KEPT:
            del self._compiled[next(iter(self._compiled))]
        self._compiled[wanted] = grammar
        return grammar

    def close(self) -> None:
        """End the child. (It also ends by itself when this process does.)"""
        if "_worker" in self.__dict__:
            self._worker.close()

    @staticmethod
    def _refusal(wanted: Wanted, why: str) -> RequestError:
        return RequestError(f"{wanted.param}: {why}", param=wanted.param)
