"""Fill in the middle: how a model takes the text before a gap and the text after it.

Models for code are trained with special tokens around both parts, each family with its own and in its own
order, which the vocabulary gives away. Whether a model was trained with them, nothing here can know. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: Stands before a suffix whose tokenizer would put a space before it; its own tokens are dropped. As in
#: Meta's code for Code Llama and in mistral-common.
_MARK = "\N{WHITE SMILING FACE}"


@dataclass(frozen=True)
class Family:
    """The special tokens of one family. ``ends``: what else ends a middle, where the vocabulary has it."""

    prefix: str
    suffix: str
    middle: str  # empty: none stands before the middle
    ends: tuple[str, ...] = ()
    suffix_first: bool = False


FAMILIES = (
    # Qwen 2.5 Coder, and CodeGemma with other ends.
    Family(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|endoftext|>"),
    ),
    # StarCoder, Granite, StableCode and others that took over its vocabulary.
    Family(
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        ("<fim_pad>", "<repo_name>", "<file_sep>", "<filename>", "<|endoftext|>"),
    ),
    # Code Llama; the marks are SentencePiece's.
    Family("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),
    # DeepSeek Coder, whose bars are full width and whose hole is where the suffix begins.
    Family(
        "<\N{FULLWIDTH VERTICAL LINE}fim▁begin\N{FULLWIDTH VERTICAL LINE}>",
        "<\N{FULLWIDTH VERTICAL LINE}fim▁hole\N{FULLWIDTH VERTICAL LINE}>",
        "<\N{FULLWIDTH VERTICAL LINE}fim▁end\N{FULLWIDTH VERTICAL LINE}>",
        ("<|EOT|>",),
    ),
    # Codestral: the middle goes on where the prefix ends.
    Family("[PREFIX]", "[SUFFIX]", "", ("[MIDDLE]",), suffix_first=True),
)


@dataclass(frozen=True)
class FillInMiddle:
    """How one model's prompts are made. ``opening``: what begins each text; ``mark``: what the suffix is
    tokenised behind, and how many tokens that has.
    """

    opening: tuple[int, ...]
    prefix: int
    suffix: int
    middle: tuple[int, ...]
    suffix_first: bool
    end_token_ids: tuple[int, ...]
    mark: str = ""
    mark_length: int = 0

    @classmethod
    def of(
        cls,
        token_id: Callable[[str], int | None],
        encode: Callable[[str], Sequence[int]],
        opening: Sequence[int],
        *,
        adds_space: bool,
    ) -> FillInMiddle | None:
        """Of a tokenizer's vocabulary; None where it has the tokens of no family. ``adds_space``: whether it
        puts a space before each text.
        """
        for family in FAMILIES:
            names = [name for name in (family.prefix, family.suffix, family.middle) if name]
            found = [one for name in names if (one := token_id(name)) is not None]
            if len(found) < len(names):
                continue
            prefix, suffix, *middle = found
            ends = [one for name in family.ends if (one := token_id(name)) is not None]
            return cls(
                tuple(opening),
                prefix,
                suffix,
                tuple(middle),
                family.suffix_first,
                (*found, *ends),
                _MARK if adds_space else "",
                len(encode(_MARK)) if adds_space else 0,
            )
        return None

    def marked(self, suffix: str) -> str:
        """What is tokenised for a suffix."""
        return self.mark + suffix

    def prompt(self, prefix: Sequence[int], marked_suffix: Sequence[int]) -> tuple[int, ...]:
        """The prompt of both parts' tokens, each tokenised without special tokens."""
        before = (self.prefix, *prefix)
        after = (self.suffix, *marked_suffix[self.mark_length :])
        parts = (*after, *before) if self.suffix_first else (*before, *after)
        return (*self.opening, *parts, *self.middle)
