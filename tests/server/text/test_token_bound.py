"""No text that would fit is refused by its length: it has never fewer tokens than its length says, and where
a tokenizer may lose text its length says nothing.
"""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from quire_server.text.tokenizer import Tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
# Four characters that NFC makes one, three of them, and a ligature that NFKC makes longer.
COMPOSED = ("\u03b1\u0313\u0300\u0345", "\u1112\u1161\u11ab", "\ufdfa", "e\u0301")


def bpe(merged, letters, **settings):
    """A model with these tokens, made by merging from the left."""
    vocabulary, merges = {letter: number for number, letter in enumerate(letters)}, []
    for token in merged:
        for end in range(2, len(token) + 1):
            left, right = token[: end - 1], token[end - 1]
            for part in (left, right, left + right):
                vocabulary.setdefault(part, len(vocabulary))
            if (left, right) not in merges:
                merges.append((left, right))
    return tokenizers.Tokenizer(models.BPE(vocabulary, merges, **settings))


def byte_level(normalizer=None, pre_tokenizer=None, merged=("hello", "\u0120\u0120\u0120\u0120"), added=()):
    library = bpe(merged, ALPHABET)
    library.normalizer = normalizer
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizer, level]) if pre_tokenizer else level
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken("<|a special token|>"), *added])
    return library


def sentencepiece(**settings):
    library = bpe(
        ["hello", SPACE * 3], [*BYTES, "<unk>"] if settings.get("byte_fallback") else ["<unk>"], **settings
    )
    library.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    library.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback()])
    return library


BOUNDED = {
    "byte level": byte_level(),
    "NFC": byte_level(normalizers.NFC()),
    "NFKC and lower case": byte_level(normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "a shortening replacement": byte_level(normalizers.Replace("hello", "h")),
    "digits apart": byte_level(None, pre_tokenizers.Digits(individual_digits=True)),
    "split, kept": byte_level(None, pre_tokenizers.Split(Regex(r"\s+"), "isolated")),
    "SentencePiece": sentencepiece(byte_fallback=True, unk_token="<unk>", fuse_unk=True),
    "unknown ones apart": sentencepiece(unk_token="<unk>", fuse_unk=False),
}
UNBOUNDED = {
    "split, removed": byte_level(None, pre_tokenizers.Split(Regex(r"\s+"), "removed")),
    "words": byte_level(None, pre_tokenizers.Whitespace()),
    "an expression replaced": byte_level(normalizers.Replace(Regex(" +"), " ")),
    "stripped": byte_level(normalizers.Strip()),
    "accents stripped": byte_level(normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
    "a token that takes the space after it": byte_level(added=[AddedToken("<|end|>", rstrip=True)]),
    "unknown ones together": sentencepiece(unk_token="<unk>", fuse_unk=True),
    "unknown ones dropped": sentencepiece(),
}
TEXTS = st.lists(
    st.sampled_from(["hello", " ", "   ", "<|a special token|>", "\n", "\N{GRINNING FACE}", "7", *COMPOSED])
    | st.text(st.characters(exclude_categories=("Cs",)), max_size=5),
    max_size=30,
).map("".join)


@pytest.mark.parametrize("name", BOUNDED)
@given(TEXTS, st.sampled_from(["hello", "    ", "<|a special token|>", *COMPOSED]), st.integers(0, 200))
def test_a_text_has_at_least_the_tokens_that_its_length_says(name, text, unit, times):
    tokenizer = Tokenizer(BOUNDED[name], ())
    for one in (text, unit * times, text + unit * times):
        assert tokenizer.least_tokens(one) <= len(tokenizer.encode(one, add_special_tokens=False))


@pytest.mark.parametrize("name", BOUNDED)
def test_a_text_of_a_million_characters_has_many_tokens(name):
    assert Tokenizer(BOUNDED[name], ()).least_tokens("x" * 1_000_000) > 10_000


@pytest.mark.parametrize("name", UNBOUNDED)
def test_where_text_may_be_lost_its_length_says_nothing(name):
    tokenizer = Tokenizer(UNBOUNDED[name], ())
    assert tokenizer.least_tokens("x" * 1_000_000) == 0
    lost = {"unknown ones together": "\u4e2d", "unknown ones dropped": "\u4e2d", "accents stripped": "\u0301"}
    before = "<|end|>" if "after it" in name else ""
    text = before + lost.get(name, " ") * 10_000
    assert len(tokenizer.encode(text, add_special_tokens=False)) <= 1000, "it does lose text"
