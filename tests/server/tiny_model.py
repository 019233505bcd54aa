"""A model directory with everything that a server reads, and weights so small that it loads in no time."""

import json

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HIDDEN, HEADS, KV_HEADS, MLP, LAYERS = 32, 4, 2, 64, 2
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write(directory, *, seed=0, layers=LAYERS, tokens=()):
    """Write a random Llama; returns the directory. ``tokens``: texts that are one token each."""
    shape = {
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "intermediate_size": MLP,
        "num_hidden_layers": layers,
        "tie_word_embeddings": True,
    }
    return write_llama(directory, shape, lambda vocab_size: _weights(vocab_size, seed, layers), tokens)


def write_llama(directory, shape, weights, tokens=()):
    """Write a Llama whose tokens are bytes, and ``tokens``. `shape`: entries of config.json; `weights`: a
    function that makes the tensors for a vocabulary of so many tokens. Returns the directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in tokens])
    tokenizer.save(str(directory / "tokenizer.json"))
    vocab_size = tokenizer.get_vocab_size()
    eos = tokenizer.token_to_id("<|im_end|>")
    documents = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": vocab_size,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "torch_dtype": "float32",
            "bos_token_id": eos,
            "eos_token_id": eos,
            **shape,
        },
        "tokenizer_config.json": {"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE},
        "generation_config.json": {"eos_token_id": eos},
    }
    for name, document in documents.items():
        (directory / name).write_text(json.dumps(document))
    save_file(weights(vocab_size), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _weights(vocab_size, seed, layers):
    random = np.random.default_rng(seed)

    def matrix(rows, columns):
        return random.normal(0, 0.2, (rows, columns)).astype(np.float32)

    kv = HIDDEN // HEADS * KV_HEADS
    weights = {
        "model.embed_tokens.weight": matrix(vocab_size, HIDDEN),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}."
        weights |= {
            at + "input_layernorm.weight": np.ones(HIDDEN, np.float32),
            at + "post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
            at + "self_attn.q_proj.weight": matrix(HIDDEN, HIDDEN),
            at + "self_attn.k_proj.weight": matrix(kv, HIDDEN),
            at + "self_attn.v_proj.weight": matrix(kv, HIDDEN),
            at + "self_attn.o_proj.weight": matrix(HIDDEN, HIDDEN),
            at + "mlp.gate_proj.weight": matrix(MLP, HIDDEN),
            at + "mlp.up_proj.weight": matrix(MLP, HIDDEN),
            at + "mlp.down_proj.weight": matrix(HIDDEN, MLP),
        }
    return weights
