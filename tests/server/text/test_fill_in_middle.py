"""Prompts to fill in the middle are those that each family's own code makes."""

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, processors

from quire_server.text.tokenizer import Tokenizer
from tests.server.text.test_sentencepiece import llama2_like

BAR = "\N{FULLWIDTH VERTICAL LINE}"


def byte_level(*tokens, bos=None):
    """Every byte is a token, and these are."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Library(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_tokens(list(tokens))
    if bos is not None:
        library.add_special_tokens([bos])
        library.post_processor = begins_with(library, bos)
    return Tokenizer(library, ())


def sentencepiece(*tokens):
    """Puts a space before each text, and <s>."""
    library = llama2_like()
    library.add_special_tokens(list(tokens))
    library.post_processor = begins_with(library, "<s>")
    return Tokenizer(library, ())


def begins_with(library, bos):
    return processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, library.token_to_id(bos))])


def written(tokenizer, prefix, suffix):
    """The tokens of a prompt, by name."""
    form = tokenizer.fill_in_middle
    encode = tokenizer.encode
    before = encode(prefix, add_special_tokens=False)
    after = encode(form.marked(suffix), add_special_tokens=False)
    return [tokenizer.token_bytes(one).decode() for one in form.prompt(before, after)]


def ends(tokenizer):
    return {tokenizer.token_bytes(one).decode() for one in tokenizer.fill_in_middle.end_token_ids}


QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
STAR_CODER = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
DEEPSEEK = tuple(f"<{BAR}fim▁{name}{BAR}>" for name in ("begin", "hole", "end"))


@pytest.mark.parametrize(
    ("tokenizer", "prompt"),
    [
        (byte_level(*QWEN), [QWEN[0], "a", "b", QWEN[1], "c", QWEN[2]]),
        (byte_level(*QWEN, bos="<bos>"), ["<bos>", QWEN[0], "a", "b", QWEN[1], "c", QWEN[2]]),
        (byte_level(*STAR_CODER), [STAR_CODER[0], "a", "b", STAR_CODER[1], "c", STAR_CODER[2]]),
        (byte_level(*DEEPSEEK, bos="<bos>"), ["<bos>", DEEPSEEK[0], "a", "b", DEEPSEEK[1], "c", DEEPSEEK[2]]),
        (byte_level("[PREFIX]", "[SUFFIX]", bos="<s>"), ["<s>", "[SUFFIX]", "c", "[PREFIX]", "a", "b"]),
    ],
)
def test_both_parts_stand_where_the_family_has_them(tokenizer, prompt):
    assert written(tokenizer, "ab", "c") == prompt


def test_the_prefix_alone_begins_with_the_space_that_sentencepiece_adds():
    code_llama = sentencepiece("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
    assert written(code_llama, "ab", "c") == ["<s>", " <PRE>", " a", "b", " <SUF>", "c", " <MID>"]
    codestral = sentencepiece("[PREFIX]", "[SUFFIX]")
    assert written(codestral, "ab", "c") == ["<s>", "[SUFFIX]", "c", "[PREFIX]", " a", "b"]


@pytest.mark.parametrize(
    ("tokens", "others"),
    [
        (QWEN, ("<|fim_pad|>", "<|file_sep|>", "<|endoftext|>")),
        (QWEN, ("<|file_separator|>",)),
        (STAR_CODER, ("<fim_pad>", "<file_sep>")),
        (DEEPSEEK, ("<|EOT|>",)),
    ],
)
def test_a_middle_ends_at_each_token_that_no_middle_has(tokens, others):
    assert ends(byte_level(*tokens, *others, "<|im_start|>")) == {*tokens, *others}


def test_a_part_may_be_empty():
    assert written(byte_level(*QWEN), "", "c") == [QWEN[0], QWEN[1], "c", QWEN[2]]


@pytest.mark.parametrize("tokens", [(), QWEN[:2], ("<|im_start|>", "<repo_name>", "<file_sep>")])
def test_a_vocabulary_without_all_of_the_tokens_has_no_form(tokens):
    assert byte_level(*tokens).fill_in_middle is None
