"""One rank's shard of a model: its configuration, and the slice of each checkpoint tensor that it reads.

A model is built twice without content, once whole and once with the rank's sizes, by the same code and for
any format of weights. The dimension in which a tensor's two shapes differ is the one that is split; how it is
split follows from the layer that the tensor belongs to. So scales and zeros of quantised weights follow their
matrix without rules of their own. Knows names and shapes, no bytes.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from quire_server.core.topology import Range, Slice, Topology, stage_layers, tensor_sizes
from quire_server.errors import ConfigError
from quire_server.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class _Split:
    """How the outputs of a layer are split, or its inputs: consecutive parts of the whole, each with the
    range that is read.
    """

    sizes: tuple[int, ...]
    ranges: tuple[Range, ...]  # each within its part
    is_of_inputs: bool = False

    @property
    def in_whole(self) -> tuple[Range, ...]:
        """The ranges within the whole."""
        starts = itertools.accumulate(self.sizes, initial=0)
        return tuple(
            Range(start + each.start, start + each.stop)
            for start, each in zip(starts, self.ranges, strict=False)
        )

    def scaled(self, size: int) -> tuple[Range, ...]:
        """The ranges in a tensor whose dimension has ``size`` elements for the whole: packed weights have
        several numbers in one, scales one for several.
        """
        total = sum(self.sizes)
        return tuple(Range(*(bound * size // total for bound in each)) for each in self.in_whole)


def shard(config: ModelConfig, topology: Topology, layers: Range | None = None) -> ModelConfig:
    """The configuration of one rank: heads, inner sizes and experts are its own, everything else is the whole
    model's. ``layers``: those of the rank's stage, if there are several stages. Raises ConfigError if the
    model cannot be divided among so many ranks.
    """
    if layers is not None:
        config = replace(config, layers=config.layers[slice(*layers)], first_layer=layers.start)
    if topology.tensor == 1:
        return replace(config, topology=topology)
    working = sizes(config)
    if topology.tensor not in working:
        stored = "" if config.quantization is None else f", stored in groups ({config.quantization.method})"
        raise ConfigError(
            f"The model cannot be divided among {topology.tensor} ranks: it has {config.num_heads} heads, "
            f"{config.num_kv_heads} heads of keys and values, and {_dimensions_text(config)}{stored}. Set "
            f"--tensor-parallel-size to one of {', '.join(map(str, working))}."
        )
    experts = config.experts
    if experts is not None:
        experts = replace(experts, owned=topology.part(experts.count))
    return replace(
        config,
        num_heads=topology.part(config.num_heads).size,
        num_kv_heads=topology.kv_heads(config.num_kv_heads).size,
        intermediate_size=topology.part(config.intermediate_size).size,
        experts=experts,
        topology=topology,
    )


def stages(
    config: ModelConfig, topology: Topology, layer_bytes: Sequence[int], head_bytes: int
) -> tuple[Range, ...]:
    """The layers of each stage. Raises ConfigError if there are more stages than layers."""
    if topology.pipeline > config.num_layers:
        raise ConfigError(
            f"The model cannot be divided among {topology.pipeline} stages: it has {config.num_layers} "
            f"layers. Set --pipeline-parallel-size to {config.num_layers} or less."
        )
    return stage_layers(layer_bytes, head_bytes, topology.pipeline)


def sizes(config: ModelConfig) -> tuple[int, ...]:
    """The tensor parallel sizes that divide the model, and its quantised weights between their groups."""
    working = tensor_sizes(config.num_heads, config.num_kv_heads, _dimensions(config))
    return tuple(size for size in working if size == 1 or _divides_groups(config, Topology(size)))


def _divides_groups(config: ModelConfig, topology: Topology) -> bool:
    if (quantization := config.quantization) is None:
        return True
    outputs, inputs = quantization.weights.granularity
    for name, split in _splits(config, topology):
        if name == "model.embed_tokens" or quantization.ignored.has(name):
            continue
        each = inputs if split.is_of_inputs else outputs
        if each is None or any(bound % each for one in split.in_whole for bound in one):
            return False
    return True


def slices(
    whole: ModelConfig, topology: Topology, full: Mapping[str, Tensor], local: Mapping[str, Tensor]
) -> dict[str, Slice]:
    """The slice of every tensor that is not read whole. ``full`` and ``local``: the tensors of the whole
    model and of the rank's shard, by name.
    """
    splits = dict(_splits(whole, topology))
    found = {}
    for name, target in local.items():
        split = splits.get(name.rpartition(".")[0])
        if split is None or topology.tensor == 1:
            continue
        shape = full[name].shape
        differing = [dim for dim, size in enumerate(shape) if size != target.shape[dim]]
        if not differing:
            continue
        (dimension,) = differing
        found[name] = Slice(dimension, split.scaled(shape[dimension]))
    return found


def matrix_parts(whole: ModelConfig, topology: Topology) -> dict[str, Slice]:
    """The outputs (dimension 0) or inputs (1) of each matrix [out, in] that a rank computes, by the matrix's
    name in the checkpoint; those that are not in it are whole.
    """
    if topology.tensor == 1:
        return {}
    return {name: Slice(int(split.is_of_inputs), split.in_whole) for name, split in _splits(whole, topology)}


def _splits(config: ModelConfig, topology: Topology) -> Iterator[tuple[str, _Split]]:
    """(the layer's name in the checkpoint, how it is split) for every layer that is."""
    vocab = Range(0, config.vocab_size)
    start = min(topology.tensor_rank * topology.padded_part(config.vocab_size), config.vocab_size)
    rows = Range(start, min(start + topology.padded_part(config.vocab_size), config.vocab_size))
    for name in ("model.embed_tokens", "lm_head"):
        yield name, _Split((vocab.size,), (rows,))
    head = config.head_size
    query = _scaled(topology.part(config.num_heads), head)
    keys = _scaled(topology.kv_heads(config.num_kv_heads), head)
    qkv = _Split(
        (config.num_heads * head, config.num_kv_heads * head, config.num_kv_heads * head), (query, keys, keys)
    )
    output = _Split((config.num_heads * head,), (query,), is_of_inputs=True)
    inner = topology.part(config.intermediate_size)
    names = config.names
    for index, layer in enumerate(config.layers):
        prefix = f"model.layers.{index}"
        yield from _parts([f"{prefix}.{name}" for name in names.qkv], qkv)
        yield f"{prefix}.{names.output}", output
        if not layer.is_sparse:
            gate_up = _Split((config.intermediate_size,) * 2, (inner, inner))
            yield from _parts([f"{prefix}.{name}" for name in names.gate_up], gate_up)
            down = _Split((config.intermediate_size,), (inner,), is_of_inputs=True)
            yield f"{prefix}.{names.down}", down


def _parts(names: list[str], split: _Split) -> Iterator[tuple[str, _Split]]:
    """One matrix of the checkpoint for each part, or one for all."""
    if len(names) == 1:
        yield names[0], split
        return
    for name, size, wanted in zip(names, split.sizes, split.ranges, strict=True):
        yield name, _Split((size,), (wanted,))


def _scaled(heads: Range, size: int) -> Range:
    return Range(heads.start * size, heads.stop * size)


def _dimensions(config: ModelConfig) -> list[int]:
    dense = any(not layer.is_sparse for layer in config.layers)
    counts = [] if config.experts is None else [config.experts.count]
    return ([config.intermediate_size] if dense else []) + counts


def _dimensions_text(config: ModelConfig) -> str:
    names = []
    if any(not layer.is_sparse for layer in config.layers):
        names.append(f"an intermediate size of {config.intermediate_size}")
    if config.experts is not None:
        names.append(f"{config.experts.count} experts")
    return " and ".join(names)
