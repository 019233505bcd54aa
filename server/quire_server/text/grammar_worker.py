"""The child process that reads a client's grammar: ``python -m quire_server.text.grammar_worker``, started by
``grammar_compiler``.

Its first question brings the vocabulary, the others ``kind`` and ``text``; the answer is the compiled text or
an error. It does all that the engine would do with the grammar, and the first few tokens of an answer, so
that a text that crashes the library or runs away crashes or ends this process and no other.
"""

from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from quire_server.core.request import GrammarKind
from quire_server.text import child_loop, grammar

_TRIAL_TOKENS = 16
_SETUP_SECONDS = 60.0  # the vocabulary is ours, and may have 256,000 tokens


def prepare(setup: dict[str, Any]) -> child_loop.Answering:
    """Compiles for the vocabulary of the setup."""
    vocabulary = grammar.Vocabulary.from_json(setup)
    tokenizer = vocabulary.tokenizer()
    return lambda question: {"text": _compile(vocabulary, tokenizer, question)}


def _compile(vocabulary: grammar.Vocabulary, tokenizer: LLTokenizer, question: dict[str, Any]) -> str:
    text = grammar.compiled(GrammarKind(question["kind"]), question["text"])
    _try(grammar.matcher(tokenizer, text), vocabulary)
    return text


def _try(matcher: LLMatcher, vocabulary: grammar.Vocabulary) -> None:
    """Follow the grammar for some tokens: what is impossible or too complex shows here, not in an answer."""
    mask = np.zeros(-(-len(vocabulary.tokens) // 32), np.uint32)
    for _ in range(_TRIAL_TOKENS):
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            why = grammar.reason(matcher.get_error())
            raise grammar.GrammarError(
                "allows no text at all" if why.startswith("NoExtension") else f"is too complex: {why}"
            )
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        spoken = [token for token in allowed if token not in vocabulary.eos_token_ids]
        if not spoken:
            return
        if not matcher.consume_token(int(spoken[0])):
            raise grammar.GrammarError(f"is too complex: {grammar.reason(matcher.get_error())}")


if __name__ == "__main__":
    child_loop.serve(prepare, _SETUP_SECONDS)
