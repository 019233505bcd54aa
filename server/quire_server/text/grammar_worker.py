"""The child process that compiles grammars: ``python -m quire_server.text.grammar_worker``, started by
``grammar_compiler``.

The first request has the vocabulary, the others ``kind`` and ``text``; the response is the compiled text or
an error. It builds the matcher as the engine would, and generates the first tokens of an answer, so that a
text that crashes the library or does not terminate ends this process and not the engine.
"""

from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from quire_server.core.sampling_params import GrammarKind
from quire_server.text import child_loop, grammar

_TRIAL_TOKENS = 16
_SETUP_SECONDS = 60.0  # the vocabulary is trusted, and may have 256,000 tokens


def prepare(setup: dict[str, Any]) -> child_loop.Handler:
    """A function that compiles grammars for the vocabulary of the setup."""
    vocabulary = grammar.Vocabulary.from_json(setup)
    tokenizer = vocabulary.tokenizer()
    return lambda request: {"text": _compile(vocabulary, tokenizer, request)}


def _compile(vocabulary: grammar.Vocabulary, tokenizer: LLTokenizer, request: dict[str, Any]) -> str:
    text = grammar.compiled(GrammarKind(request["kind"]), request["text"])
    _try(grammar.matcher(tokenizer, text), vocabulary)
    return text


def _try(matcher: LLMatcher, vocabulary: grammar.Vocabulary) -> None:
    """Generate some tokens, to find grammars that allow nothing or are too complex before the engine gets
    them.
    """
    mask = np.zeros(-(-len(vocabulary.tokens) // 32), np.uint32)
    for _ in range(_TRIAL_TOKENS):
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            why = grammar.reason(matcher.get_error())
            raise grammar.GrammarError(
                "allows no text at all" if why.startswith("NoExtension") else f"is too complex: {why}"
            )
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        with_text = [token for token in allowed if token not in vocabulary.eos_token_ids]
        if not with_text:
            return
        if not matcher.consume_token(int(with_text[0])):
            raise grammar.GrammarError(f"is too complex: {grammar.reason(matcher.get_error())}")


if __name__ == "__main__":
    child_loop.serve(prepare, child_loop.Limits(setup_seconds=_SETUP_SECONDS))
