"""How many characters of a text one token can stand for, at most: what a long text costs at least is then
known before it is tokenised.

Only for tokenizers of which every step is known to lose nothing; for others there is no bound. A bound that
is too high refuses too little, and one that is too low would refuse a text that fits: in doubt there is none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tokenizers

# NFC replaces at most four characters by one: no canonical decomposition is longer.
_COMPOSED = 4
_NORMALIZERS = {"NFC": _COMPOSED, "NFKC": _COMPOSED} | dict.fromkeys(
    ("NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel"), 1
)
_KEEPING = frozenset({"ByteLevel", "Metaspace", "Digits"})
_SPLITTING = frozenset({"Split", "Punctuation"})  # keep all, unless they are to remove what they find


def characters_per_token(
    library: tokenizers.Tokenizer, vocabulary: Mapping[str, int], token_bytes: Mapping[int, bytes]
) -> int | None:
    """The most characters of a text that one of its tokens stands for; None where that is not known.

    A token stands for no more characters than it has bytes, once the text is normalised.
    """
    normalized = _shrinking(_state(library.normalizer))
    if normalized is None or not _keeps_all(_state(library.pre_tokenizer)):
        return None
    if any(token.lstrip or token.rstrip for token in library.get_added_tokens_decoder().values()):
        return None  # such a token takes any amount of white space
    if not _knows_all(library, vocabulary):
        return None
    return normalized * max(map(len, token_bytes.values()), default=1)


def _state(part: Any) -> dict[str, Any]:
    """A part of the tokenizer as in tokenizer.json; empty where there is none."""
    state: dict[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return state


def _shrinking(normalizer: Mapping[str, Any]) -> int | None:
    """The most characters that become one; None where there is no limit to them."""
    if not normalizer:
        return 1
    kind = normalizer["type"]
    if kind == "Sequence":
        product = 1
        for part in normalizer["normalizers"]:
            if (factor := _shrinking(part)) is None:
                return None
            product *= factor
        return product
    if kind == "Replace":
        found, content = normalizer["pattern"].get("String"), normalizer["content"]
        return -(-len(found) // len(content)) if found and content else None
    return _NORMALIZERS.get(kind)


def _keeps_all(pre_tokenizer: Mapping[str, Any]) -> bool:
    """Whether the words that a text is split into hold all of it."""
    if not pre_tokenizer:
        return True
    kind = pre_tokenizer["type"]
    if kind == "Sequence":
        return all(_keeps_all(part) for part in pre_tokenizer["pretokenizers"])
    return kind in _KEEPING or (kind in _SPLITTING and pre_tokenizer["behavior"] != "Removed")


def _knows_all(library: tokenizers.Tokenizer, vocabulary: Mapping[str, int]) -> bool:
    """Whether no character is dropped, or becomes one token together with its neighbours."""
    model = library.model
    if not isinstance(model, tokenizers.models.BPE):
        return False
    if model.unk_token is not None and not model.fuse_unk:
        return True
    if model.byte_fallback:
        return all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    parts = json.dumps([_state(library.normalizer), _state(library.pre_tokenizer)])
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    return '"ByteLevel"' in parts and all(letter in vocabulary for letter in alphabet)
