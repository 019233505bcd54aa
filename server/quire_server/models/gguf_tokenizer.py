"""GGUF vocabulary and merges -> tokenizer.json and tokenizer_config.json.

Called by ``import_gguf``. llama.cpp names a pre-tokenizer ("smollm") and keeps its regex in code; the table
below is that code for the byte-level BPE families that Llama-shaped models come with.
"""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from quire_server.core.errors import ConfigError, ModelCorruptError
from quire_server.models.gguf_config import Metadata

_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's token types

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def build(metadata: Metadata) -> tuple[Tokenizer, dict[str, Any]]:
    """(tokenizer, tokenizer_config.json)."""
    kind = metadata.need("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ConfigError(
            f"GGUF tokenizer {kind!r} is not supported, only byte-level BPE ('gpt2'). "
            "Serve the model's safetensors release instead."
        )
    tokens = metadata.need("tokenizer.ggml.tokens")
    types = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    pre = metadata.get("tokenizer.ggml.pre", "default")
    merges = [tuple(merge.split(" ")) for merge in metadata.need("tokenizer.ggml.merges")]
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens) or len(types) != len(tokens):
        raise ModelCorruptError(
            "The GGUF vocabulary repeats a token, or has no type for each. Download it again."
        )
    try:
        tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=pre in {"llama-bpe", "llama3"}))
    except Exception as error:  # the library raises bare Exception for merges outside the vocabulary
        raise ModelCorruptError(f"The GGUF merges do not fit its vocabulary: {error}") from None
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        AddedToken(t, special=True, normalized=False)
        for t, k in zip(tokens, types, strict=True)
        if k == _CONTROL
    ]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False) for t, k in zip(tokens, types, strict=True) if k == _USER_DEFINED]
    )
    names = {role: _token(metadata, tokens, role) for role in ("bos", "eos", "padding", "unknown")}
    adds_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", pre in {"llama-bpe", "llama3"}))
    if adds_bos and names["bos"] is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{names['bos']} $A",
            pair=f"{names['bos']} $A {names['bos']}:1 $B:1",
            special_tokens=[(names["bos"], vocab[names["bos"]])],
        )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": names["bos"],
        "eos_token": names["eos"],
        "pad_token": names["padding"],
        "unk_token": names["unknown"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(metadata.need("llama.context_length")),
        "chat_template": metadata.get("tokenizer.chat_template"),
    }
    return tokenizer, {key: value for key, value in config.items() if value is not None}


def _pre_tokenizer(pre: str) -> Any:
    def split(pattern: str) -> Any:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    match pre:
        case "smollm":  # every digit is its own word, then GPT-2's pattern
            digits = pre_tokenizers.Digits(individual_digits=True)
            return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        case "llama-bpe" | "llama3":
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
