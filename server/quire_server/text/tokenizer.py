"""Text to token ids and back, with the model's tokenizer.json.

Encoding is done by the ``tokenizers`` library. Decoding is done here, on bytes: the bytes of a token do not
depend on its neighbours, so streamed deltas add up to exactly the text of decoding all tokens at once.
"""

import codecs
import functools
import json
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from quire_server.errors import ConfigError, ModelCorruptError, RequestError
from quire_server.model_dir.files import ModelFiles, check_values
from quire_server.model_dir.generation_config import eos_token_ids
from quire_server.text import rust_panics, token_bound
from quire_server.text.fill_in_middle import FillInMiddle
from quire_server.text.pair_layout import PairLayout

# One text is tokenised by the thread that asks for it: the library's own threads are for many texts.
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# The largest one of a supported model is Gemma 3's, with 33 MB: 262,144 tokens, half a million merges.
_LIMIT = 48 << 20
_MAX_VALUES = 3_000_000
# Repetitions that end with another character: what an expression with nested quantifiers takes longest for.
_PLAIN_TEXTS = tuple(character * 64 + end for character in "ax1. \n" for end in ("!", "b"))
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's mark for a space


class Tokenizer:
    """The tokenizer of one model. Thread-safe."""

    def __init__(self, library: tokenizers.Tokenizer, eos_ids: tuple[int, ...]) -> None:
        library.no_truncation()
        library.no_padding()
        self._library = library
        self.eos_token_ids = eos_ids
        self.vocab_size: int = library.get_vocab_size(with_added_tokens=True)
        added = library.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        parts = _decoder_parts(library)
        self._strips_first_space = "Strip" in parts or "Metaspace" in parts
        vocabulary = library.get_vocab(with_added_tokens=True)
        tokens = {token_id: token for token, token_id in vocabulary.items()}
        self._strips_first_space |= "WordPiece" in parts
        if "ByteLevel" in parts:
            from_byte_level = _byte_level_table()
            self._bytes = {i: _from_byte_level(token, from_byte_level) for i, token in tokens.items()}
        elif parts & {"Metaspace", "ByteFallback", "Replace"}:
            self._bytes = {i: _from_sentencepiece(token) for i, token in tokens.items()}
        elif "WordPiece" in parts:
            self._bytes = {i: _from_word_piece(token, self._special, i) for i, token in tokens.items()}
        else:
            raise ConfigError(
                f"The tokenizer decodes by {sorted(parts) or 'nothing'}, which is not supported; supported: "
                "byte-level, SentencePiece and WordPiece."
            )
        self._characters_per_token = token_bound.characters_per_token(library, vocabulary, self._bytes)

    @functools.cached_property
    def ends_texts(self) -> bool:
        """Whether a special token ends each text."""
        last = self.encode("a")[-1:]
        return bool(last) and last[0] in self._special

    @functools.cached_property
    def pair_layout(self) -> PairLayout:
        """How two texts become a pair. Raises ConfigError."""
        return PairLayout.of(self._library)

    @functools.cached_property
    def fill_in_middle(self) -> FillInMiddle | None:
        """How a text is asked for that goes between two others; None where the vocabulary has no tokens for
        it.
        """
        return FillInMiddle.of(
            self.token_id,
            functools.partial(self.encode, add_special_tokens=False),
            self.encode(""),
            adds_space=self._strips_first_space,
        )

    @classmethod
    def load(cls, model_dir: Path) -> "Tokenizer":
        """Read and check tokenizer.json."""
        files = ModelFiles.open(model_dir)
        loaded = cls(_read(files), eos_token_ids(files))
        loaded.refuse_hopeless_expressions()
        return loaded

    def refuse_hopeless_expressions(self) -> None:
        """Raise ModelCorruptError where an expression of tokenizer.json backtracks without an end on a short,
        plain text.
        """
        for text in _PLAIN_TEXTS:
            try:
                self.encode(text)
            except RequestError as error:
                raise ModelCorruptError(
                    f"tokenizer.json cannot be used: on {text[:3]}..., {len(text)} characters. {error}. "
                    "Use the tokenizer.json that the model was published with."
                ) from None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Special tokens in the text are recognised, because chat templates contain them.

        As a batch, although it is one text: for a batch the library releases the interpreter's lock.
        """
        try:
            with rust_panics.as_errors():
                encoded = self._library.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return list(encoded[0].ids)
        except rust_panics.RustPanicError as error:
            raise RequestError(f"The model's tokenizer cannot split this text: {error}") from None
        except (TypeError, UnicodeEncodeError):
            raise RequestError("The text is not valid Unicode (it has lone surrogates).") from None

    def least_tokens(self, text: str) -> int:
        """How many tokens a text has at least, by its length alone; 0 where that says nothing."""
        most = self._characters_per_token
        return 0 if most is None else -(-len(text) // most)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of all tokens."""
        decoder = TextDecoder(self, skip_special_tokens=skip_special_tokens)
        text = decoder.push(token_ids) + decoder.finish()
        return text.removeprefix(" ") if self._strips_first_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; empty for an id outside the vocabulary."""
        return self._bytes.get(token_id, b"")

    def text_bytes(self, token_id: int) -> bytes:
        """The bytes of a token in text: empty for special tokens, which are skipped."""
        return b"" if token_id in self._special else self._bytes.get(token_id, b"")

    def special_tokens(self, texts: Collection[str]) -> dict[str, int]:
        """The ids of those of the texts that are special tokens."""
        found = {text: self._library.token_to_id(text) for text in texts}
        return {text: token_id for text, token_id in found.items() if token_id in self._special}

    def token_id(self, text: str) -> int | None:
        """The id of a text that is one token."""
        found: int | None = self._library.token_to_id(text)
        return found

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a special (control) token."""
        return token_id in self._special


class TextDecoder:
    """Tokens -> text, holding back at most one unfinished UTF-8 character. ``shown``: special tokens that are
    not skipped.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool, shown: Collection[int] = ()
    ) -> None:
        self._bytes_of = tokenizer.text_bytes if skip_special_tokens else tokenizer.token_bytes
        if skip_special_tokens and shown:
            self._bytes_of = lambda token_id: (
                tokenizer.token_bytes if token_id in shown else tokenizer.text_bytes
            )(token_id)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that is complete with these tokens."""
        return self._utf8.decode(b"".join([self._bytes_of(token_id) for token_id in token_ids]))

    def finish(self) -> str:
        """After the last token: a replacement character for an unfinished character."""
        return self._utf8.decode(b"", final=True)


def refuse_other_vocabulary(model: ModelFiles, draft: ModelFiles) -> None:
    """Raise ConfigError unless every token has the same id in both models, because drafts are token ids."""
    ours, theirs = (_read(files).get_vocab(with_added_tokens=True) for files in (model, draft))
    if ours == theirs:
        return
    token = min(ours.items() ^ theirs.items(), key=lambda item: item[1])[0]
    ids = f"{ours.get(token, 'none')} of the model and {theirs.get(token, 'none')} of the draft"
    raise ConfigError(
        f"The draft model has another tokenizer: {token[:40]!r} is token {ids}. Take one of the same family."
    )


def _read(files: ModelFiles) -> tokenizers.Tokenizer:
    data = files.read("tokenizer.json", _LIMIT)
    check_values(data, "tokenizer.json", _MAX_VALUES)
    try:
        with rust_panics.as_errors():
            return tokenizers.Tokenizer.from_str(data.decode())
    except Exception as error:  # the library raises bare Exception for every kind of bad file
        raise ModelCorruptError(
            f"tokenizer.json cannot be used: {str(error)[:200]}. Download the model again."
        ) from None


def _decoder_parts(library: tokenizers.Tokenizer) -> frozenset[str]:
    """Type names of the decoder and, for a sequence, of its members."""
    if library.decoder is None:
        return frozenset()
    state: dict[str, Any] = json.loads(library.decoder.__getstate__())
    members = state.get("decoders", [state])
    return frozenset(member["type"] for member in members)


def _byte_level_table() -> dict[str, int]:
    """GPT-2's mapping of bytes to printable characters, inverted: other bytes are mapped from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _from_byte_level(token: str, table: dict[str, int]) -> bytes:
    try:
        return bytes([table[character] for character in token])
    except KeyError:  # an added token, which is plain text
        return token.encode()


def _from_word_piece(token: str, special: Collection[int], token_id: int) -> bytes:
    """A piece that begins a word has a space before it."""
    if token.startswith("##"):
        return token[2:].encode()
    return token.encode() if token_id in special else f" {token}".encode()


def _from_sentencepiece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(_SPACE, " ").encode()
