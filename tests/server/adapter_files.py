"""Random LoRA adapters in PEFT's layout, and models into which one is merged as PEFT does it."""

import json
import math
import shutil

import numpy as np
import torch
from safetensors.torch import load_file, save_file

EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write(directory, model, *, seed=1, rank=4, alpha=8.0, targets=EVERY, scale=0.2, **config):
    """Write an adapter of random numbers for a model's directory; returns its directory. ``config``: more
    entries of its configuration.
    """
    directory.mkdir(parents=True, exist_ok=True)
    random, tensors = np.random.default_rng(seed), {}
    for name, weight in load_file(model / "model.safetensors").items():
        matrix = name.removesuffix(".weight")
        if matrix.rpartition(".")[2] in targets:
            for factor, shape in (("lora_A", (rank, weight.shape[1])), ("lora_B", (weight.shape[0], rank))):
                numbers = random.normal(0, scale, shape).astype(np.float32)
                tensors[f"base_model.model.{matrix}.{factor}.weight"] = torch.from_numpy(numbers)
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    document = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(targets)}
    (directory / "adapter_config.json").write_text(json.dumps({**document, "bias": "none", **config}))
    return directory


def merged(model, adapter, directory):
    """The model's directory with W + scaling * B A in place of each target's W, in float32."""
    shutil.copytree(model, directory, ignore=shutil.ignore_patterns("quire-manifest.json"))
    config = json.loads((adapter / "adapter_config.json").read_text())
    rank = config["r"]
    scaling = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    factors = load_file(adapter / "adapter_model.safetensors")
    weights = load_file(model / "model.safetensors")
    for name in factors:
        if name.endswith(".lora_A.weight"):
            matrix = name.removesuffix(".lora_A.weight")
            product = factors[f"{matrix}.lora_B.weight"].double() @ factors[name].double()
            key = matrix.removeprefix("base_model.model.") + ".weight"
            weights[key] = (weights[key].double() + scaling * product).float()
    (directory / "model.safetensors").unlink()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
