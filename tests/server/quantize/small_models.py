"""Small random models with a tokenizer, of sizes that groups of 32 divide, and texts for them."""

import random
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.server import tiny_model
from tests.server.models import families, quantized_matrix

VOCAB = 258  # the bytes and two special tokens of tiny_model's tokenizer
_SIZES = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def build(directory: Path, family: str = "Llama", **more: Any) -> transformers.PreTrainedModel:
    """A model of the family with a few inputs much larger than others, as in real models."""
    sizes = quantized_matrix.settings(family) | _SIZES | more
    families.build(directory, family, sizes)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith("layernorm.weight"):
            tensor[::16] += 6
    save_file(tensors, path, {"format": "pt"})
    tokenizer = tiny_model.write(directory / "other")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tokenizer / file).rename(directory / file)
    for file in tokenizer.iterdir():
        file.unlink()
    tokenizer.rmdir()
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def text(path: Path, seed: int, length: int = 2000) -> Path:
    """Random letters."""
    rng = random.Random(seed)
    path.write_text("".join(rng.choices("abcdefgh ijklmnop.\n", k=length)))
    return path
