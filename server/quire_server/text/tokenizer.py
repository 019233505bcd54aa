"""Text to token ids and back, by the `tokenizers` library from the model's tokenizer.json.

Called by the API process. Knows the bytes behind each token, which is what streaming and logprobs need;
knows neither chat nor requests, and runs nothing that the model directory brings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from quire_server.core.errors import ConfigError, ModelCorruptError
from quire_server.core.model_files import ModelFiles, parse_json_object

TOKENIZER_LIMIT = 64 << 20

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """One model's tokenizer. Safe to use from several threads."""

    def __init__(self, library: tokenizers.Tokenizer, eos_token_ids: tuple[int, ...]) -> None:
        self._library = library
        self.eos_token_ids = eos_token_ids
        self.vocab_size = library.get_vocab_size(with_added_tokens=True)
        added = library.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._plain = {token_id: token.content for token_id, token in added.items()}
        decoder = json.loads(library.to_str()).get("decoder")
        self._byte_level = "ByteLevel" in set(_decoder_types(decoder))
        if not self._byte_level and "ByteFallback" not in set(_decoder_types(decoder)):
            raise ConfigError(
                "tokenizer.json uses a decoder that is neither byte-level nor with byte fallback, "
                "which this server cannot stream. Serve a model of a supported family."
            )

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer:
        """Read tokenizer.json. Raises ModelNotFoundError, ModelCorruptError or ConfigError."""
        files = ModelFiles.open(model_dir)
        text = files.read("tokenizer.json", TOKENIZER_LIMIT)
        parse_json_object(text, "tokenizer.json")
        try:
            library = tokenizers.Tokenizer.from_str(text.decode())
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises bare Exception, and PanicException beside it
            raise ModelCorruptError(
                f"tokenizer.json is not a tokenizer: {error}. Download or import the model again."
            ) from None
        library.no_truncation()
        library.no_padding()
        return cls(library, _eos_token_ids(files, library))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Text that spells a special token becomes that token, as everywhere in the field."""
        ids: list[int] = self._library.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The whole text of these tokens; ids outside the vocabulary are left out."""
        text: str = self._library.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def is_special(self, token_id: int) -> bool:
        """Whether the token is markup (end of text, turn marks) rather than text."""
        return token_id in self._special

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that this token stands for in the middle of a text; none outside the vocabulary."""
        token = self._library.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            try:
                return bytes(_BYTE_OF_CHARACTER[character] for character in token)
            except KeyError:
                return token.encode()
        if token_id in self._plain:
            return self._plain[token_id].encode()
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()


def _decoder_types(decoder: Mapping[str, Any] | None) -> Iterator[str]:
    if decoder:
        yield str(decoder.get("type"))
        for inner in decoder.get("decoders", ()):
            yield from _decoder_types(inner)


def _eos_token_ids(files: ModelFiles, library: tokenizers.Tokenizer) -> tuple[int, ...]:
    """Ids that end an answer: of generation_config.json, else config.json, and the tokenizer's eos token."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        stated = files.read_json(name).get("eos_token_id") if files.exists(name) else None
        ids = [stated] if isinstance(stated, int) else list(stated) if isinstance(stated, list) else []
        if ids:
            break
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise ModelCorruptError("eos_token_id is no token id. Download or import the model again.")
    if files.exists("tokenizer_config.json"):
        token = token_text(files.read_json("tokenizer_config.json").get("eos_token"))
        known = None if token is None else library.token_to_id(token)
        if known is not None and known not in ids:
            ids.append(known)
    return tuple(ids)


def token_text(entry: object) -> str | None:
    """A special token as tokenizer_config.json spells it: a string, or an object with its content."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, the other way round (openai/gpt-2, encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(256 + offset): byte for offset, byte in enumerate(others)})
    return alphabet


_BYTE_OF_CHARACTER = _byte_alphabet()
