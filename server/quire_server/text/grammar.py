"""Structured output: a client's schema, expression or grammar as an llguidance grammar, and the limits of
compiling it.

The API process's ``grammar_worker`` and the engine's ``runner.structured_outputs`` build matchers by the same
function with the same limits, so that a hostile text harms the worker process before it reaches the engine.
Knows no HTTP and no tensors.
"""

import base64
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark

from quire_server.core.sampling_params import GrammarKind
from quire_server.text import ebnf, rust_panics
from quire_server.text.output_parsers.call_grammar import CallGrammar
from quire_server.text.tokenizer import Tokenizer

MAX_BYTES = 64 << 10  # of a schema, a regular expression, a list of choices or a grammar
_MAX_COMPILED_BYTES = 4 * MAX_BYTES
_LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,  # about 10 ms of work
    step_lexer_fuel=20_000,  # a few ms: the limit of one mask in the engine's loop
    step_max_items=20_000,
    max_lexer_states=20_000,  # 1 to 2 kB each
    max_grammar_size=200_000,
    verbose_errors=False,  # they contain the schema, and errors are logged
)
# Without forced tokens, the mask has every token that the grammar allows, not only the tokenizer's choice; so
# masks need no tokenizer.
_HEADER = '%llguidance {"no_forcing": true}\n'
# Between JSON tokens: nothing, a space, or a new line with indentation. With unbounded white space, small
# models may generate nothing else.
_WHITESPACE = r" ?|\n[ ]{0,32}"
_JSON_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": _WHITESPACE, "lenient": False}
_OPTIONS = "x-guidance"


class GrammarError(ValueError):
    """The text is not a valid or supported grammar; the message says why."""


@dataclass(frozen=True)
class Vocabulary:
    """The bytes of each token id; a grammar can never match a special token."""

    tokens: Sequence[bytes]
    special_token_ids: Sequence[int]
    eos_token_ids: Sequence[int]

    is_tokenizer_wrapper = True  # the library reads this object's fields
    bos_token_id = None

    @property
    def eos_token_id(self) -> int:
        """The first end-of-sequence token, which llguidance needs."""
        return self.eos_token_ids[0]

    def __call__(self, text: str) -> NoReturn:
        """Nothing asks for token ids, since nothing is forced."""
        raise NotImplementedError

    @classmethod
    def of(cls, tokenizer: Tokenizer, eos_token_ids: Sequence[int], size: int) -> "Vocabulary":
        """As many tokens as there are logits; those that the tokenizer does not know are empty."""
        special = [index for index in range(size) if tokenizer.is_special(index)]
        return cls([tokenizer.token_bytes(index) for index in range(size)], special, tuple(eos_token_ids))

    def to_json(self) -> dict[str, Any]:
        """For a pipe."""
        text = base64.b64encode(b"".join(self.tokens)).decode()
        lengths = [len(token) for token in self.tokens]
        ids = {"special": list(self.special_token_ids), "eos": list(self.eos_token_ids)}
        return {"text": text, "lengths": lengths, **ids}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Vocabulary":
        """The inverse of ``to_json``."""
        text, tokens, start = base64.b64decode(value["text"]), [], 0
        for length in value["lengths"]:
            tokens.append(text[start : start + length])
            start += length
        return cls(tokens, value["special"], value["eos"])

    def tokenizer(self) -> LLTokenizer:
        """llguidance's trie of all tokens. Takes about 2 us a token."""
        with rust_panics.as_errors():
            return LLTokenizer(self, n_vocab=len(self.tokens), eos_token=list(self.eos_token_ids))  # type: ignore[arg-type]  # read by its fields


def compiled(kind: GrammarKind, text: str) -> str:
    """A client's text as an llguidance grammar. Raises GrammarError."""
    if len(text.encode()) > MAX_BYTES:
        raise GrammarError(f"is longer than {MAX_BYTES} bytes")
    try:
        result = _HEADER + _START[kind](text)
    except RecursionError:
        raise GrammarError("is nested too deeply") from None
    except ebnf.EbnfError as error:
        raise GrammarError(str(error)) from None
    if len(result) > _MAX_COMPILED_BYTES:
        raise GrammarError(f"is longer than {_MAX_COMPILED_BYTES} bytes once it is compiled")
    return result


def matcher(tokenizer: LLTokenizer, text: str) -> LLMatcher:
    """A new matcher for a compiled grammar. Raises GrammarError. Releases the GIL."""
    try:
        with rust_panics.as_errors():
            result = LLMatcher(tokenizer, text, log_level=0, limits=_LIMITS)
    except rust_panics.RustPanicError as error:
        raise GrammarError(f"made the compiler fail: {error}") from None
    if result.is_error():
        raise GrammarError(reason(result.get_error()))
    return result


def reason(error: str) -> str:
    """The useful part of an llguidance error message."""
    if (found := re.search(r"^error: (.*)", error, re.MULTILINE)) is not None:
        return found[1][:300]  # of a regular expression; the expression itself precedes it
    line = error.partition("\n")[0].partition("<state>")[0].partition("<non-verbose/>")[0]
    return re.sub(r"^at \d+\(\d+\): ", "", line.strip())[:300]


def _json(text: str) -> str:
    schema = json.loads(text)
    if not isinstance(schema, dict):
        raise GrammarError("must be a JSON object")
    if _OPTIONS in schema:
        raise GrammarError(f"{_OPTIONS} is not supported")
    return "start: %json " + json.dumps({**schema, _OPTIONS: _JSON_OPTIONS})


def _regex(text: str) -> str:
    r"""\d, \w and \s are ASCII, as in JavaScript. The whole answer has to match, with or without anchors."""
    return f"start: /{regex_to_lark(text, use_ascii='dws')}/".replace("\n", "\\n").replace("\r", "\\r")


def _choice(text: str) -> str:
    # One terminal, because the parser would distinguish its alternatives one character too late.
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice) for choice in json.loads(text))


def _tools(text: str) -> str:
    return CallGrammar.from_json(text).to_lark(_JSON_OPTIONS)


_START = {
    GrammarKind.JSON: _json,
    GrammarKind.REGEX: _regex,
    GrammarKind.CHOICE: _choice,
    GrammarKind.GRAMMAR: ebnf.to_lark,
    GrammarKind.TOOLS: _tools,
}
