"""Compiles a client's schema, expression or grammar for the engine, or raises an error that names the
request's field.

A child process (``grammar_worker``) does the work, because it may take too long or too much memory. The
latest results are cached, and refusals too: what took too long once costs nothing when it is sent again. Each
scope of clients has results of its own, as of the prefix cache, or times would tell what others have sent.
"""

import functools
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from quire_server.core.sampling_params import Grammar, GrammarKind
from quire_server.errors import RequestError
from quire_server.text.child_process import ChildProcess
from quire_server.text.grammar import MAX_BYTES, Vocabulary
from quire_server.text.tokenizer import Tokenizer

_CACHE_SIZE = 64
_NUM_REFUSALS = 1024
_REFUSED_SECONDS = 300.0  # a busy machine may have been the reason


@dataclass(frozen=True)
class GrammarRequest:
    """The structure that a client wants. ``param``: the field of the HTTP request that has it."""

    kind: GrammarKind
    text: str
    param: str


class GrammarCompiler:
    """Thread-safe; compiles one text at a time."""

    def __init__(self, tokenizer: Tokenizer, clock: Callable[[], float] = time.monotonic) -> None:
        self._has_end = bool(tokenizer.eos_token_ids)
        self._tokenizer = tokenizer
        self._clock = clock
        self._compiled: dict[tuple[str, GrammarRequest], Grammar] = {}
        self._refused: dict[bytes, tuple[float, str]] = {}  # by digest: until when, and why

    @functools.cached_property
    def _worker(self) -> ChildProcess:
        """Started on first use: many servers never need it, and the vocabulary is large."""
        tokenizer = self._tokenizer
        vocabulary = Vocabulary.of(tokenizer, tokenizer.eos_token_ids, tokenizer.vocab_size)
        return ChildProcess("quire_server.text.grammar_worker", vocabulary.to_json())

    def known(self, wanted: GrammarRequest, scope: str = "") -> Grammar | None:
        """The cached result of ``compile``, if there is one. Raises RequestError where that is a refusal."""
        if (grammar := self._compiled.get((scope, wanted))) is not None:
            return grammar
        until, why = self._refused.get(_digest(wanted, scope), (0.0, ""))
        if why and self._clock() < until:
            raise self._refusal(wanted, why)
        return None

    def compile(self, wanted: GrammarRequest, scope: str = "") -> Grammar:
        """The compiled grammar. Raises RequestError. Blocks for up to 2 s: call it in a thread."""
        if not self._has_end:
            raise self._refusal(wanted, "the model has no token that ends a text")
        if len(wanted.text.encode()) > MAX_BYTES:
            raise self._refusal(wanted, f"is longer than {MAX_BYTES} bytes")
        if (known := self.known(wanted, scope)) is not None:
            return known
        answer = self._worker.ask({"kind": wanted.kind, "text": wanted.text})
        if "error" in answer:
            if len(self._refused) >= _NUM_REFUSALS:
                del self._refused[next(iter(self._refused))]
            self._refused[_digest(wanted, scope)] = (self._clock() + _REFUSED_SECONDS, answer["error"])
            raise self._refusal(wanted, answer["error"])
        grammar = Grammar(wanted.kind, answer["text"])
        if len(self._compiled) >= _CACHE_SIZE:
            del self._compiled[next(iter(self._compiled))]
        self._compiled[scope, wanted] = grammar
        return grammar

    def close(self) -> None:
        """End the child process. (It also ends when this process does.)"""
        if "_worker" in self.__dict__:
            self._worker.close()

    @staticmethod
    def _refusal(wanted: GrammarRequest, why: str) -> RequestError:
        return RequestError(f"{wanted.param}: {why}", param=wanted.param)


def _digest(wanted: GrammarRequest, scope: str) -> bytes:
    """Identifies a text without keeping it."""
    text = "\0".join((scope, wanted.kind, wanted.param, wanted.text))
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()
