"""GGUF files of small models as llama.cpp's converter writes them, by the ``gguf`` package and its names."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from safetensors.torch import load_file

VOCAB = 300
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def write(path: Path, model_dir: Path, **metadata: Any) -> Path:
    """``metadata``: overrides, as of another or a faulty converter."""
    config = transformers.AutoConfig.from_pretrained(model_dir)
    kind = {"qwen3_moe": "qwen3moe", "mixtral": "llama", "gemma3_text": "gemma3"}
    architecture = metadata.get("architecture", kind.get(config.model_type, config.model_type))
    writer = gguf.GGUFWriter(path, architecture)
    _add_sizes(writer, config)
    for key, value in metadata.get("own", {}).items():
        writer.add_float32(f"{architecture}.{key}", value)
    if metadata.get("tokenizer", "gpt2") == "llama":
        add_sentencepiece(writer)
    else:
        add_byte_level(writer, metadata)
    known = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    written = known[architecture if architecture in kind.values() else config.model_type]
    names = gguf.get_tensor_name_map(written, config.num_hidden_layers)
    for name, tensor in _tensors(load_file(model_dir / "model.safetensors"), config, architecture):
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(stored, metadata.get("instead", {}).get(stored, tensor.contiguous().numpy()))
    for name, values in metadata.get("extra", {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_sizes(writer: gguf.GGUFWriter, config: transformers.PretrainedConfig) -> None:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    ropes = config.rope_parameters
    ropes = ropes.get("full_attention", ropes)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(ropes["rope_theta"])
    writer.add_rope_dimension_count(int(head * ropes.get("partial_rotary_factor", 1.0)))
    if ropes["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(ropes["rope_type"]))
        writer.add_rope_scaling_factor(ropes["factor"])
    if ropes["rope_type"] in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])
    if config.model_type in ("gemma2", "gemma3_text", "phi3"):
        writer.add_sliding_window(config.sliding_window or 0)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type in ("mixtral", "qwen3_moe"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type == "qwen3_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _tensors(
    tensors: dict[str, torch.Tensor], config: transformers.PretrainedConfig, architecture: str
) -> Iterator[tuple[str, torch.Tensor]]:
    stacks: dict[str, list[torch.Tensor]] = {}
    for name in sorted(tensors, key=lambda name: [int(n) for n in re.findall(r"\d+", name)]):
        tensor = tensors[name]
        if _EXPERT.search(name):
            stacks.setdefault(_EXPERT.sub(".experts.", name), []).append(tensor)
            continue
        if architecture == "llama" and re.search(r"\.[qk]_proj\.", name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            tensor = interleaved(tensor, heads)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        yield name, tensor
    for name, stack in stacks.items():
        yield name, torch.stack(stack)


def interleaved(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """q and k in llama.cpp's order, as its converter writes them."""
    return (
        rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
        .swapaxes(1, 2)
        .reshape(rows.shape)
    )


def add_byte_level(writer: gguf.GGUFWriter, metadata: dict[str, Any]) -> None:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    tokens = ["<end>", "<user>", *alphabet, "he", "12"]
    tokens += [f"<unused{i}>" for i in range(VOCAB - len(tokens))]
    writer.add_tokenizer_model(metadata.get("tokenizer", "gpt2"))
    writer.add_tokenizer_pre(metadata.get("pre", "smollm"))
    writer.add_token_list(tokens)
    writer.add_token_types([3, 4] + [1] * (VOCAB - 2))
    writer.add_token_merges(metadata.get("merges", ["h e", "1 2"]))
    writer.add_eos_token_id(metadata.get("eos", 0))
    writer.add_bos_token_id(1)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{{ messages[0].content }}")


def add_sentencepiece(writer: gguf.GGUFWriter) -> None:
    """Bytes, then pieces, best first, with decreasing scores as in SentencePiece."""
    pieces = ["▁t", "he", "▁the", "in", "re", "▁a", "▁there", "at", "▁cat", "ing", "▁▁", "er", "▁▁▁"]
    letters = list("▁etaoinshrdlucmfwypvbgkqjxzEBäß.,!12")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [2, 3, 3] + [6] * 256 + [1] * len(pieces)
    tokens, types = tokens + letters, types + [1] * len(letters)
    tokens.insert(259, "<start_of_turn>")
    types.insert(259, 4)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 260 + [-float(index) for index in range(len(tokens) - 260)])
    writer.add_token_types(types)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_space_prefix("gemma" not in writer.arch)
