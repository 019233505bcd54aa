"""The compile keys that serving launches with at the shapes of real models, recorded without a GPU. Writes
bench/results/serving_keys.json, whose keys `bench.aot` compiles.

    python -m bench.record_serving_keys              # record all models
    python -m bench.record_serving_keys "8B, W8A8"    # print how many keys this one has, and write nothing

A key is recorded as in the tests of compile keys, over tensors that have shapes and no data, while the start
of a server runs its warm-up and captures its graphs. One layer of a model is enough: all are alike, or as in
Gemma two are.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.gpu.sizes import Model, llama
from bench.serving_keys import FILE, GPUS, name_of
from quire_server.layers.linear import GpuLinear
from quire_server.models import registry
from quire_server.runner import kv_cache
from quire_server.runner.adapters import Adapters, whole_matrices
from quire_server.runner.gpu import warm_up
from quire_server.runner.gpu.executor import GpuExecutor
from quire_server.runner.input_batch import InputBatch
from tests.kernels.gpu.as_cuda import as_cuda
from tests.kernels.gpu.compile_keys import CompileKey, recorded
from tests.kernels.gpu.host_syncs import CUDA, fill_fake, host_syncs

_WITH_FP8 = tuple(gpu for gpu in GPUS if gpu >= 89)
_BLOCKS, _BLOCK_SIZE = 8, 16  # the operator's default size of a block
_ROWS, _TOKENS, _LONGEST = 24, 512, 2048  # these meet every number of splits and both tilings of prompts
_DEFAULT_WARPS, _DEFAULT_STAGES = 4, 3  # Triton's, of an NVIDIA GPU
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
_AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True, "group_size": 128}
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
_W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": _INT8 | {"strategy": "channel"},
            "input_activations": _INT8 | {"strategy": "token", "dynamic": True},
        }
    },
}
_8B = llama(4096, 14_336, 1, (32, 8, 128), 128_256)
_70B = llama(8192, 28_672, 1, (64, 8, 128), 128_256)
_1B = llama(2048, 8192, 1, (32, 8, 64), 128_256, tie_word_embeddings=True)
_MIXTRAL = llama(
    4096, 14_336, 1, (32, 8, 128), 32_000, architectures=["MixtralForCausalLM"], model_type="mixtral",
    num_local_experts=8, num_experts_per_tok=2,
)  # fmt: skip
_GEMMA = llama(
    3584, 14_336, 2, (16, 8, 256), 256_000, architectures=["Gemma2ForCausalLM"], model_type="gemma2",
    hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh", sliding_window=4096,
    query_pre_attn_scalar=256, attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
    tie_word_embeddings=True,
)  # fmt: skip
_QWEN = llama(4096, 12_288, 1, (32, 8, 128), 151_936, architectures=["Qwen3ForCausalLM"], model_type="qwen3")


@dataclass(frozen=True, slots=True)
class Served:
    """A model with its server's settings; ``more`` of config.json, ``gpus`` that can compute it."""

    document: Model
    more: Mapping[str, Any] = field(default_factory=dict)
    kv_cache_dtype: str = "auto"
    drafts: int = 0
    adapters: int = 0
    gpus: tuple[int, ...] = GPUS


MODELS = {
    "8B": Served(_8B),
    "8B, 3 drafts": Served(_8B, drafts=3),
    "8B, FP8 cache": Served(_8B, kv_cache_dtype="fp8", gpus=_WITH_FP8),
    "8B, INT8 cache": Served(_8B, kv_cache_dtype="int8"),
    "8B, 4 bits": Served(_8B, {"quantization_config": _AWQ}),
    "8B, FP8": Served(_8B, {"quantization_config": _FP8}, gpus=_WITH_FP8),
    "8B, W8A8": Served(_8B, {"quantization_config": _W8A8}),
    "8B, adapters": Served(_8B, adapters=3),
    "8x7B": Served(_MIXTRAL),
    "1B": Served(_1B),
    "70B": Served(_70B),
    "Gemma 9B": Served(_GEMMA),
    "Qwen 8B": Served(_QWEN),
}


def met(
    served: Served, *, rows: int = _ROWS, tokens: int = _TOKENS, longest: int = _LONGEST
) -> list[CompileKey]:
    """The keys of the start of such a server, which are those of serving. ``rows`` of a step, ``tokens`` of
    it, ``longest`` sequence.
    """
    with as_cuda(), host_syncs() as (device, _), recorded() as keys:
        config = registry.parse({**served.document, **served.more}, ())
        model = registry.build(config, max_len=longest, dtype=torch.bfloat16, device=CUDA, linear=GpuLinear)
        fill_fake(model)
        adapters = None
        if served.adapters:
            matrices = whole_matrices(model)
            adapters = Adapters(model, served.adapters, 16, torch.bfloat16, CUDA, matrices)
        stored = kv_cache.storage_dtype(served.kv_cache_dtype, torch.bfloat16)
        caches = kv_cache.allocate(config, _BLOCKS, _BLOCK_SIZE, dtype=stored, device=CUDA)
        executor = GpuExecutor(
            model, caches, InputBatch(rows, longest, _BLOCK_SIZE), device,
            num_drafts=served.drafts, adapters=None if adapters is None else adapters.batch,
        )  # fmt: skip
        has_graphs = not model.needs_host_sync
        warm_up.prepare(executor, tokens, lambda done, wanted: None, has_graphs=has_graphs)
    return list(keys.first)


def entry(key: CompileKey) -> dict[str, Any]:
    """The key as it stands in the file."""
    options = dict(key.options)
    types = {name: kind for name, kind, _ in key.arguments if kind != "constexpr"}
    return {
        "kernel": key.kernel,
        "types": types,
        "aligned": [name for name, kind, what in key.arguments if kind != "constexpr" and what == "D"],
        "constants": {name: what for name, kind, what in key.arguments if kind == "constexpr"},
        "warps": options.get("num_warps", _DEFAULT_WARPS),
        "stages": options.get("num_stages", _DEFAULT_STAGES),
        "registers": options.get("maxnreg"),
    }


def record(models: Mapping[str, Served]) -> list[dict[str, Any]]:
    """The entries of the file, from these models."""
    found: dict[str, dict[str, Any]] = {}
    for model, served in models.items():
        for key in met(served):
            one = entry(key)
            kept = found.setdefault(name_of(one), one | {"models": [], "gpus": []})
            if {name: kept[name] for name in one} != one:
                raise ValueError(f"two keys have one name: {name_of(one)}")
            kept["models"].append(model)
            kept["gpus"] = sorted({*kept["gpus"], *served.gpus})
    return [found[name] for name in sorted(found)]


def main(arguments: Sequence[str]) -> int:
    """Record the named models, or all of them and write the file."""
    entries = record({name: MODELS[name] for name in arguments} if arguments else MODELS)
    print(f"{len(entries)} keys")
    if not arguments:
        lines = ",\n".join(json.dumps(each) for each in entries)
        FILE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
