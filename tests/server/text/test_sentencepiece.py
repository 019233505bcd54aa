"""Tokenizers of the SentencePiece kind: marks for spaces, bytes for what the vocabulary lacks."""

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers

from quire_server.text.detokenizer import IncrementalDetokenizer
from quire_server.text.tokenizer import Tokenizer


def llama2_like() -> Library:
    """A few pieces, all bytes, and the decoder that Llama 2's tokenizer.json has."""
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcXé", "▁a"]
    library = Library(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)}, [("▁", "a")], unk_token="<unk>", byte_fallback=True
        )
    )
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens(["<s>"])
    return library


LIBRARY = llama2_like()
TOKENIZER = Tokenizer(LIBRARY, ())


@given(st.text("ab cX é你🙂", max_size=20))
def test_any_text_comes_back_as_the_library_decodes_it(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == LIBRARY.decode(ids) == text


@given(st.text("ab cX é你🙂", max_size=20))
def test_an_answer_keeps_the_space_that_it_begins_with_and_its_characters_whole(text: str) -> None:
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    pieces = [detokenizer.push([token_id]) for token_id in TOKENIZER.encode(text)]
    assert "".join(pieces) + detokenizer.finish() == (" " + text if text else "")


def test_bytes_of_no_character_become_replacement_characters() -> None:
    ids = [LIBRARY.token_to_id(piece) for piece in ("a", "<0xE4>", "<0xBD>", "b")]
    assert TOKENIZER.decode(ids) == "a\N{REPLACEMENT CHARACTER}b"
