"""The detokenizer: pieces join to the decoded text, cut at the first stop string, at any split."""

import functools
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from quire_server.text.detokenizer import IncrementalDetokenizer
from quire_server.text.tokenizer import TextDecoder, Tokenizer
from tests.examples import examples


def byte_level_library() -> Library:
    """One token per byte, a few longer ones that end inside a character, one special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ã", "©"), ("ð", "Ł"), ("Ġ", "t")]
    tokens = [*alphabet, *("".join(pair) for pair in merges)]
    library = Library(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<|end|>"])
    return library


LIBRARY = byte_level_library()
TOKENIZER = Tokenizer(LIBRARY, ())
token_ids = st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40)
texts = st.text(st.characters(codec="utf-8"), max_size=30)


def in_chunks(ids: Sequence[int], cuts: set[int]) -> list[list[int]]:
    edges = [0, *sorted(cut for cut in cuts if 0 < cut < len(ids)), len(ids)]
    return [list(ids[a:b]) for a, b in zip(edges, edges[1:], strict=False)]


def joined(detokenizer: IncrementalDetokenizer, chunks: Sequence[Sequence[int]]) -> str:
    return "".join(detokenizer.push(chunk) for chunk in chunks) + detokenizer.finish()


@given(token_ids, st.sets(st.integers(0, 40)))
def test_the_pieces_of_any_tokens_in_any_chunks_join_to_what_the_library_decodes(
    ids: list[int], cuts: set[int]
) -> None:
    assert joined(IncrementalDetokenizer(TOKENIZER), in_chunks(ids, cuts)) == LIBRARY.decode(ids)


@given(texts)
def test_every_piece_of_a_text_is_made_of_whole_characters(text: str) -> None:
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    pieces = [detokenizer.push((token_id,)) for token_id in TOKENIZER.encode(text)]
    assert "".join(pieces) == text
    assert detokenizer.finish() == ""


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.data())
def test_the_text_ends_before_the_stop_string_that_is_complete_first(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    ids = TOKENIZER.encode(text)
    cuts = data.draw(st.sets(st.integers(0, len(ids))))
    detokenizer = IncrementalDetokenizer(TOKENIZER, stops)

    out = joined(detokenizer, in_chunks(ids, cuts))

    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    if not ends:
        assert (out, detokenizer.stopped) == (text, None)
    else:
        until = text[: ends[0]]
        stopped = max((stop for stop in stops if until.endswith(stop)), key=len)
        assert (out, detokenizer.stopped) == (until.removesuffix(stopped), stopped)


@given(
    st.lists(st.sampled_from([*b"ab", *"é😀".encode()]), max_size=30),
    st.lists(st.text("abé😀", min_size=1, max_size=3), min_size=1, max_size=3),
    st.sets(st.integers(0, 30)),
    st.integers(0, 12),
    st.booleans(),
)
@settings(max_examples=examples(300))
def test_stops_count_past_min_tokens_and_no_text_waits_longer_than_a_stop_may_need(
    raw: list[int], stops: list[str], cuts: set[int], min_tokens: int, include: bool
) -> None:
    """Tokens are bytes, valid or not, so that characters end anywhere."""
    ids = [next(i for i in range(256) if TOKENIZER.token_bytes(i) == bytes([byte])) for byte in raw]
    detokenizer = IncrementalDetokenizer(TOKENIZER, stops, include_stop=include, min_tokens=min_tokens)
    decoder, whole, out = TextDecoder(TOKENIZER, skip_special_tokens=True), "", ""
    exempt = len(TextDecoder(TOKENIZER, skip_special_tokens=True).push(ids[:min_tokens]))

    def end(text: str) -> tuple[str, str | None]:
        for at in range(exempt + 1, len(text) + 1):
            found = [stop for stop in stops if text[:at].endswith(stop)]
            if found:
                stop = max(found, key=len)
                return text[:at] if include else text[: at - len(stop)], stop
        return text, None

    for chunk in in_chunks(ids, cuts):
        out += detokenizer.push(chunk)
        whole += decoder.push(chunk)
        text, stopped = end(whole)
        if stopped is None:
            held = max(n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n]))
            text = text[: len(text) - held]
        assert (out, detokenizer.stopped) == (text, stopped)
        if stopped is not None:
            return
    out += detokenizer.finish()
    assert (out, detokenizer.stopped) == end(whole + decoder.finish())


def test_only_a_tail_that_may_become_a_stop_string_is_held_back() -> None:
    detokenizer = IncrementalDetokenizer(TOKENIZER, ["\n\nUser:"])
    assert detokenizer.push(TOKENIZER.encode("Hello")) == "Hello"
    assert detokenizer.push(TOKENIZER.encode(" you\n")) == " you"
    assert detokenizer.push(TOKENIZER.encode("and me\n\nUse")) == "\nand me"
    assert detokenizer.finish() == "\n\nUse"


def test_special_tokens_are_not_text_unless_asked_for() -> None:
    ids = TOKENIZER.encode("a<|end|>b")
    assert joined(IncrementalDetokenizer(TOKENIZER), [ids]) == "ab"
    assert joined(IncrementalDetokenizer(TOKENIZER, skip_special_tokens=False), [ids]) == "a<|end|>b"


@settings(max_examples=examples(50))
@given(text=texts)
def test_the_real_tokenizers_pieces_join_to_what_it_decodes(smollm2: Path, text: str) -> None:
    library, tokenizer = _loaded(smollm2)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert joined(IncrementalDetokenizer(tokenizer), [[i] for i in ids]) == library.decode(ids)


@functools.cache
def _loaded(model: Path) -> tuple[Library, Tokenizer]:
    return Library.from_file(str(model / "tokenizer.json")), Tokenizer.load(model)


@pytest.mark.parametrize("decoder", [decoders.CTC(), None])
def test_a_decoder_that_cannot_be_streamed_is_refused(decoder: object) -> None:
    library = Library(models.BPE({"a": 0}, []))
    library.decoder = decoder  # type: ignore[assignment]  # None is what a file without a decoder gives
    with pytest.raises(Exception, match="not supported"):
        Tokenizer(library, ())


def test_word_pieces_join_without_spaces_and_special_tokens_have_none() -> None:
    library = Library(models.WordPiece({"[SEP]": 0, "on": 1, "##ce": 2, "up": 3}, unk_token="[SEP]"))
    library.add_special_tokens([AddedToken("[SEP]")])
    library.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(library, ())
    assert tokenizer.decode([1, 2, 3, 0]) == "once up"
    assert tokenizer.decode([1, 0, 3], skip_special_tokens=False) == "on[SEP] up"
