"""Maps an architecture name to the module of its model family, and builds models: one line per model."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quire_server.errors import ConfigError, ModelCorruptError
from quire_server.layers.linear import Linear, LinearFactory
from quire_server.layers.parallel import Communicator
from quire_server.layers.quantized import linear as quantized
from quire_server.model_dir.files import ModelFiles
from quire_server.model_dir.generation_config import eos_token_ids
from quire_server.models import gemma, llama, mistral, mixtral, phi3, qwen2, qwen3, qwen3_moe
from quire_server.models.config import ModelConfig
from quire_server.models.config_fields import REMEDY, ConfigFields
from quire_server.models.decoder import Decoder

FAMILIES: Mapping[str, Callable[[ConfigFields], ModelConfig]] = {
    "Gemma2ForCausalLM": gemma.configure_2,
    "Gemma3ForCausalLM": gemma.configure_3,
    "LlamaForCausalLM": llama.configure,
    "MistralForCausalLM": mistral.configure,
    "MixtralForCausalLM": mixtral.configure,
    "Phi3ForCausalLM": phi3.configure,
    "Qwen2ForCausalLM": qwen2.configure,
    "Qwen3ForCausalLM": qwen3.configure,
    "Qwen3MoeForCausalLM": qwen3_moe.configure,
}

_MAX_EXPERTS = 1 << 16  # in all layers; even their names take memory


def load(files: ModelFiles, *, without_head: bool = False) -> ModelConfig:
    """Parse the directory's config.json. ``without_head``: it may name the decoder alone, as `Qwen3Model`."""
    document = files.read_json("config.json")
    named = document.get("architectures")
    if without_head and isinstance(named, list):
        document["architectures"] = [
            re.sub("Model$", "ForCausalLM", name) if isinstance(name, str) else name for name in named
        ]
    return parse(document, eos_token_ids(files))


def parse(document: Mapping[str, Any], eos_ids: tuple[int, ...]) -> ModelConfig:
    """The checked configuration. Raises an error that names the key if anything in the file was not read and
    may matter.
    """
    named = document.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str):
        raise ModelCorruptError(f"config.json: 'architectures' does not name one architecture. {REMEDY}")
    if named[0] not in FAMILIES:
        raise ConfigError(
            f"Architecture {named[0][:60]!r} is not supported; supported: {', '.join(sorted(FAMILIES))}."
        )
    fields = ConfigFields(document)
    config = FAMILIES[named[0]](fields)
    fields.refuse_unread()
    return replace(config, eos_token_ids=eos_ids)


def tensors(config: ModelConfig, linear: LinearFactory = Linear) -> dict[str, Tensor]:
    """Every tensor that the checkpoint must contain, by name, without content. A float type means any float
    type.
    """
    if config.experts is not None and config.experts.count * config.num_layers > _MAX_EXPERTS:
        raise ModelCorruptError(
            f"config.json: {config.num_layers} layers of {config.experts.count} experts are not believable."
        )
    return skeleton(config, linear).targets()


def skeleton(config: ModelConfig, linear: LinearFactory = Linear) -> Decoder:
    """The model without content."""
    return build(config, max_len=1, dtype=torch.float32, device=torch.device("meta"), linear=linear)


def layer_bytes(config: ModelConfig, dtype: torch.dtype, linear: LinearFactory) -> tuple[int, ...]:
    """Bytes of each layer's matrices in the form that it computes with."""
    sized = build(config, max_len=1, dtype=dtype, device=torch.device("meta"), linear=linear)
    return tuple(
        sum(tensor.nbytes for one in layer.linears for tensor in one.weights()) for layer in sized.layers
    )


def head_bytes(config: ModelConfig, dtype: torch.dtype, linear: LinearFactory) -> int:
    """Bytes of the head in the form that it computes with. A step reads it also where it is the embedding."""
    untied = replace(config, tie_word_embeddings=False)
    sized = build(untied, max_len=1, dtype=dtype, device=torch.device("meta"), linear=linear)
    assert sized.head is not None
    return sum(tensor.nbytes for tensor in sized.head.weights())


def build(
    config: ModelConfig,
    *,
    max_len: int,
    dtype: torch.dtype,
    device: torch.device,
    linear: LinearFactory = Linear,
    host_layers: Collection[int] = (),
    communicator: Communicator | None = None,
) -> Decoder:
    """The model with its weights allocated and not filled. ``linear`` makes the linear layers, or the dense
    layers behind those of a quantised checkpoint. The matrices of ``host_layers`` are allocated on the host.
    """
    if config.quantization is not None:
        linear = quantized.factory(config.quantization, linear)
    return Decoder(
        config,
        max_len=max_len,
        dtype=dtype,
        device=device,
        linear=linear,
        host_layers=host_layers,
        communicator=communicator,
    )
