"""A small model as its author publishes it: files that are needed, and others."""

import hashlib
import json
import random

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
WANTED = ("config.json", "model.safetensors.index.json", *SHARDS, "tokenizer.json")


def files(shard_bytes: int = 300_000, seed: int = 0) -> dict[str, bytes]:
    """By name. Weights are noise, since fetching does not parse them."""
    rng = random.Random(seed)
    index = {"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}
    return {
        "config.json": b'{"model_type": "llama"}',
        "tokenizer.json": b'{"version": "1.0"}',
        "model.safetensors.index.json": json.dumps(index).encode(),
        **{shard: rng.randbytes(shard_bytes) for shard in SHARDS},
        "consolidated.safetensors": b"the same weights once more",
        "pytorch_model.bin": b"a pickle",
        "README.md": b"# Tiny",
    }


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
