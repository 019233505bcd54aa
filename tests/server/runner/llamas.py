"""Small random Llamas made by transformers, which is also what says how they are to answer."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VARIANTS: dict[str, dict[str, object]] = {
    "tied": {"tie_word_embeddings": True},
    "untied, one kv head, biases": {
        "tie_word_embeddings": False,
        "num_key_value_heads": 1,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "llama3 rope, own head size": {
        "head_dim": 24,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "linear rope, all kv heads": {
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    },
}


def make(directory: Path, variant: str) -> LlamaForCausalLM:
    """Write the model to the directory; return it."""
    torch.manual_seed(len(variant))
    settings: dict[str, object] = {
        "vocab_size": 211,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.25,  # wide: the likeliest token then stands clear of the second
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    model = LlamaForCausalLM(LlamaConfig(**(settings | VARIANTS[variant]))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory)
    return model


@torch.inference_mode()
def answers(model: LlamaForCausalLM, prompts: Sequence[Sequence[int]], length: int) -> list[list[int]]:
    """Greedy, one prompt at a time."""
    results = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=length,
            min_new_tokens=length,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        results.append(output[0, ids.shape[1] :].tolist())
    return results
