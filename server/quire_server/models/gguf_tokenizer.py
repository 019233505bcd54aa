"""Converts a GGUF vocabulary to tokenizer.json and tokenizer_config.json.

GGUF names a pre-tokenizer ("smollm") whose regular expression is in llama.cpp's code; the table below has
those of the byte-level BPE families. A SentencePiece vocabulary ("llama") has scores in place of merges.
"""

from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from quire_server.errors import ConfigError, ModelCorruptError
from quire_server.models.gguf_config import Metadata

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # llama.cpp's token types
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's symbol for a space
_LONGEST = 200  # characters of a piece; every split of a piece is tried

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_LLAMA3_NAMES = frozenset({"llama-bpe", "llama3"})


def build(metadata: Metadata) -> tuple[Tokenizer, dict[str, Any]]:
    """(tokenizer, tokenizer_config.json)."""
    kind = metadata.need("tokenizer.ggml.model")
    if kind not in _BUILDERS:
        raise ConfigError(
            f"GGUF tokenizer {kind!r} is not supported; supported: {', '.join(_BUILDERS)}. "
            "Serve the model's safetensors release instead."
        )
    tokens = metadata.need("tokenizer.ggml.tokens")
    types = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if len(set(tokens)) != len(tokens) or len(types) != len(tokens):
        raise ModelCorruptError(
            "The GGUF vocabulary repeats a token, or has no type for each. Download it again."
        )
    tokenizer = _BUILDERS[kind](metadata, tokens, types)
    tokenizer.add_special_tokens(
        [
            AddedToken(t, special=True, normalized=False)
            for t, k in zip(tokens, types, strict=True)
            if k == _CONTROL
        ]
    )
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False) for t, k in zip(tokens, types, strict=True) if k == _USER_DEFINED]
    )
    names = {role: _token(metadata, tokens, role) for role in ("bos", "eos", "padding", "unknown")}
    by_default = kind == "llama" or metadata.get("tokenizer.ggml.pre") in _LLAMA3_NAMES
    adds_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", by_default))
    if adds_bos and names["bos"] is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{names['bos']} $A",
            pair=f"{names['bos']} $A {names['bos']}:1 $B:1",
            special_tokens=[(names["bos"], tokens.index(names["bos"]))],
        )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": names["bos"],
        "eos_token": names["eos"],
        "pad_token": names["padding"],
        "unk_token": names["unknown"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(metadata.number("context_length")),
        "chat_template": metadata.get("tokenizer.chat_template"),
    }
    return tokenizer, {key: value for key, value in config.items() if value is not None}


def _byte_level(metadata: Metadata, tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    merges = _merges(metadata.need("tokenizer.ggml.merges"))
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = _bpe(vocab, merges, ignore_merges=pre in _LLAMA3_NAMES)
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Metadata, tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    """SentencePiece BPE: of all neighbours that form a piece, the one with the best score is merged first. A
    space is written as a symbol, and a character without a piece as its bytes.
    """
    is_gemma = metadata.architecture.startswith("gemma")
    pieces = [_SPACE * len(t) if t.isspace() and set(t) == {" "} else t for t in tokens]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    if max(map(len, pieces)) > _LONGEST:
        raise ModelCorruptError(
            f"The GGUF vocabulary has a token of more than {_LONGEST} characters. Download it again."
        )
    scores = metadata.get("tokenizer.ggml.scores", [])
    if is_gemma or len(scores) != len(pieces):
        scores = [
            -float(index) for index in range(len(pieces))
        ]  # in order of ids; Gemma's scores do not give the order
    stored = metadata.get("tokenizer.ggml.merges")
    merges = _merges(stored) if stored is not None else _implied(vocab, types, scores)
    unknown = next((piece for piece, kind in zip(pieces, types, strict=True) if kind == _UNKNOWN), None)
    tokenizer = _bpe(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    parts: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    normalizer: list[Any] = [normalizers.Replace(" ", _SPACE)]
    if metadata.get("tokenizer.ggml.add_space_prefix", not is_gemma):
        normalizer.insert(0, normalizers.Prepend(_SPACE))
        parts.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer, tokenizer.decoder = normalizers.Sequence(normalizer), decoders.Sequence(parts)
    return tokenizer


_BUILDERS: dict[str, Callable[[Metadata, Sequence[str], Sequence[int]], Tokenizer]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}


def _implied(vocab: dict[str, int], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to form a piece from two others, best piece first."""
    merges = [
        (-scores[index], vocab[piece[:cut]], vocab[piece[cut:]], piece[:cut], piece[cut:])
        for piece, index in vocab.items()
        if types[index] not in (_UNKNOWN, _CONTROL)
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    return [(left, right) for _, _, _, left, right in sorted(merges)]


def _merges(stored: Sequence[str]) -> list[tuple[str, str]]:
    """(left, right) pairs. A merge without a space has an empty right side, which fits no vocabulary."""
    return [(left, right) for left, _, right in (merge.partition(" ") for merge in stored)]


def _bpe(vocab: dict[str, int], merges: Sequence[tuple[str, str]], **settings: Any) -> Tokenizer:
    try:
        return Tokenizer(BPE(vocab, merges, **settings))
    except Exception as error:  # the library raises a bare Exception for merges outside the vocabulary
        raise ModelCorruptError(f"The GGUF merges do not fit its vocabulary: {error}") from None


def _pre_tokenizer(pre: str) -> Any:
    def split(pattern: str) -> Any:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    match pre:
        case "smollm":  # single digits, then GPT-2's pattern
            digits = pre_tokenizers.Digits(individual_digits=True)
            return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        case "llama-bpe" | "llama3" | "dbrx":  # dbrx: Phi-4
            return split(_LLAMA3)
        case "qwen2":
            return split(_QWEN2)
        case "default" | "gpt-2":
            return pre_tokenizers.ByteLevel(add_prefix_space=False)
    raise ConfigError(
        f"GGUF pre-tokenizer {pre!r} is not supported. Serve the model's safetensors release instead."
    )


def _token(metadata: Metadata, tokens: list[str], role: str) -> str | None:
    index = metadata.get(f"tokenizer.ggml.{role}_token_id")
    if index is None:
        return None
    if not 0 <= index < len(tokens):
        raise ModelCorruptError(
            f"The GGUF {role} token {index} lies outside its vocabulary. Download it again."
        )
    return str(tokens[index])
