"""A Llama of 1.1 B random parameters, for Quire as a checkpoint and for llama.cpp as GGUF (used by
``bench.cpu``).

Speed does not depend on the values, so nothing is downloaded. Both are made once and kept. Knows neither
engine.
"""

import re
from pathlib import Path

import gguf
from safetensors.torch import load_file
from transformers import LlamaConfig

from bench.tensor_parallel import write_model

#: TinyLlama's sizes.
MODEL = LlamaConfig(
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=22,
    num_attention_heads=32,
    num_key_value_heads=4,
    vocab_size=32_000,
    max_position_embeddings=2048,
    tie_word_embeddings=False,
    bos_token_id=0,
    eos_token_id=1,
)


def write(directory: Path, model: LlamaConfig = MODEL) -> Path:
    """The checkpoint, in bfloat16; made if it is not there."""
    if not directory.exists():
        partial = directory.with_suffix(".partial")
        write_model(partial, model)
        partial.rename(directory)
    return directory


def write_gguf(directory: Path, target: Path) -> Path:
    """The checkpoint in float16 as GGUF, without a vocabulary; made if it is not there. The rows of queries
    and keys keep their order, which says nothing in random matrices.
    """
    if target.exists():
        return target
    partial = target.with_suffix(".partial")
    config = LlamaConfig.from_pretrained(directory)
    writer = gguf.GGUFWriter(partial, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    tensors = load_file(directory / "model.safetensors")
    for name in sorted(tensors, key=lambda name: [int(number) for number in re.findall(r"\d+", name)]):
        tensor = tensors[name]
        stored = names.get_name(name, try_suffixes=(".weight",))
        assert stored is not None
        writer.add_tensor(stored, (tensor.float() if tensor.dim() == 1 else tensor.half()).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(target)
    return target
