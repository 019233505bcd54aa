"""A model of a shape, with random weights made on the device: nothing is read, and it says nothing."""

from pathlib import Path
from typing import NoReturn

import torch

from bench.gpu.place import Place
from bench.gpu.sizes import Model, Sizes
from quire_server.core import weight_offload
from quire_server.core.topology import Topology
from quire_server.layers.linear import GpuLinear
from quire_server.layers.parallel import Communicator
from quire_server.models import registry, sharding
from quire_server.models.decoder import Decoder
from quire_server.runner import kv_cache
from quire_server.runner.gpu import memory_profile
from quire_server.runner.gpu.weight_stream import WeightStream
from quire_server.runner.loader import LoadedModel
from quire_server.runner.model_runner import ModelRunner, RunnerConfig
from quire_server.runner.structured_outputs import Grammars

_SPREAD = 0.02  # of weights
_WHOLE = Topology()
_SCALE = 2.0**-7  # of a step of quantised ones: exact in float16, as those of checkpoints in 4 bits


def options(
    place: Place, sizes: Sizes, *, kv_cache_dtype: str = "auto", cpu_offload_gb: float = 0.0
) -> RunnerConfig:
    """As a server for all streams would have them."""
    longest = max(max(sizes.long_prompts) + 64, sum(sizes.lengths))
    return memory_profile.arithmetic(
        RunnerConfig(
            device="cuda",
            dtype="bfloat16",
            kv_cache_dtype=kv_cache_dtype,
            block_size=sizes.block,
            max_num_seqs=max(sizes.streams),
            max_num_batched_tokens=max(max(sizes.long_prompts), max(sizes.streams)),
            max_model_len=longest,
            cpu_offload_gb=cpu_offload_gb,
        ),
        place.runner_device.capability,
    )


def runner(
    place: Place,
    document: Model,
    chosen: RunnerConfig,
    *,
    topology: Topology = _WHOLE,
    communicator: Communicator | None = None,
) -> ModelRunner:
    """As `load_model` makes it of a checkpoint; one rank's part of the model, where there are several."""
    device, dtype = place.fresh_device(), torch.bfloat16
    config = sharding.shard(registry.parse(document, ()), topology)
    longest = kv_cache.longest_context(config, chosen)
    host_layers: tuple[int, ...] = ()
    if chosen.cpu_offload_gb:
        host_layers = weight_offload.streamed_layers(layer_bytes(document), chosen.cpu_offload_gb)
    model = registry.build(
        config,
        max_len=longest,
        dtype=dtype,
        device=place.device,
        linear=GpuLinear,
        host_layers=host_layers,
        communicator=communicator,
    )
    fill(model, place.device)
    if host_layers:
        model.stream = WeightStream(model, host_layers, device)
    stored = kv_cache.storage_dtype(chosen.kv_cache_dtype, dtype)
    block_bytes = kv_cache.block_bytes(config, chosen.block_size, stored)
    measured = memory_profile.measure(model, chosen, device, stored, longest)
    chosen = memory_profile.sized(chosen, measured, config, block_bytes)
    num_blocks, max_model_len = kv_cache.plan(config, chosen, block_bytes)
    caches = kv_cache.allocate(config, num_blocks, chosen.block_size, dtype=stored, device=place.device)
    memory = {"weights": measured.weights, "workspace": measured.workspace}
    method = "none" if config.quantization is None else config.quantization.method
    parts = LoadedModel(
        model, caches, num_blocks, max_model_len, "bfloat16", method, device, memory, 0, None, None, ()
    )  # fmt: skip
    return ModelRunner(parts, chosen, Grammars(_no_grammar))


def layer_bytes(document: Model) -> tuple[int, ...]:
    """Of each layer's matrices."""
    return registry.layer_bytes(registry.parse(document, ()), torch.bfloat16, GpuLinear)


def read_bytes(document: Model) -> int:
    """Weights that a step reads: all but the table of the tokens, unless it is the last layer, too."""
    config = registry.parse(document, ())
    tensors = registry.tensors(config, GpuLinear)
    if not config.tie_word_embeddings:
        del tensors["model.embed_tokens.weight"]
    return sum(
        # Float32 stands for any type of float; here, for one of 16 bits.
        tensor.numel() * (2 if tensor.dtype == torch.float32 else tensor.itemsize)
        for tensor in tensors.values()
    )


def kv_token_bytes(document: Model, kv_cache_dtype: str) -> int:
    """Keys and values of a token in all layers."""
    config = registry.parse(document, ())
    return kv_cache.block_bytes(config, 1, kv_cache.storage_dtype(kv_cache_dtype, torch.bfloat16))


def fill(model: Decoder, device: torch.device) -> None:
    """Random weights, whose products stay finite."""
    for name, target in model.targets().items():
        if "norm" in name:
            target.fill_(1.0)
        elif "scale" in name:
            target.fill_(_SCALE)
        elif target.is_floating_point():
            spread = 1.0 if target.itemsize == 1 else _SPREAD
            target.copy_(torch.randn(target.shape, dtype=torch.bfloat16, device=device) * spread)
        else:
            target.random_()
    model.finish()


def _no_grammar() -> NoReturn:
    raise AssertionError(f"{Path(__file__).name}: no request has a grammar")
