"""Loads a model: opens the checkpoint, checks every setting, reads the weights, allocates the KV caches.

Checks come before the weights are read, so that settings that cannot work fail at once.
"""

import logging
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from quire_server.core import weight_offload
from quire_server.core.kv_division import KVDivision, KVMemory
from quire_server.core.topology import Range, Topology
from quire_server.errors import ConfigError
from quire_server.layers.int8_linear import has_native_kernels, native_kernels
from quire_server.layers.linear import Linear, LinearFactory
from quire_server.layers.parallel import Communicator
from quire_server.layers.quantized.linear import Dequantized
from quire_server.model_dir.files import ModelFiles
from quire_server.models import registry, sharding, weights
from quire_server.models.config import ModelConfig
from quire_server.models.decoder import Decoder
from quire_server.runner import adapters, kv_cache, quantization
from quire_server.runner.adapters import Adapters
from quire_server.runner.config import RunnerConfig
from quire_server.runner.gpu import memory_profile
from quire_server.runner.gpu.device import Device
from quire_server.runner.gpu.weight_stream import WeightStream
from quire_server.runner.kv_blocks import HostKVBlocks
from quire_server.runner.kv_offload import DiskTier, OffloadWorker
from quire_server.runner.ranks import SINGLE, Membership
from quire_server.text.tokenizer import refuse_other_vocabulary

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model directory whose config.json and safetensors headers were read and checked. The weights are
    still in the files.
    """

    files: ModelFiles
    config: ModelConfig
    shards: tuple[weights.Shard, ...]
    dtype_name: str
    quantization: str
    linear: LinearFactory

    @classmethod
    def open(
        cls, model_dir: Path, *, dtype: str, quantization_name: str, capability: int | None = None
    ) -> "Checkpoint":
        """Read config.json and the headers, and choose dtype and quantization (``auto`` depends on the
        machine). ``capability``: compute capability of the GPU that is to compute, if one is.
        """
        files = ModelFiles.open(model_dir)
        config = registry.load(files)
        chosen, linear = quantization.choose(
            quantization_name,
            checkpoint=config.quantization,
            dtype_is_auto=dtype == "auto",
            stored=config.dtype,
            capability=capability,
        )
        chosen_dtype = dtype_name(dtype, config.dtype, linear, for_gpu=capability is not None)
        tied = ("lm_head.weight",) if config.tie_word_embeddings else ()
        shards = weights.inspect(files, registry.tensors(config, linear), tied)
        return cls(files, config, shards, chosen_dtype, chosen, linear)

    @property
    def dtype(self) -> torch.dtype:
        """The type that the model computes in."""
        return DTYPES[self.dtype_name]

    @property
    def arithmetic(self) -> str:
        """dtype and quantization, for the log."""
        return f"{self.dtype_name} {self.quantization}"

    @property
    def size(self) -> int:
        """Bytes to read."""
        return sum(shard.size for shard in self.shards)

    @property
    def layer_bytes(self) -> tuple[int, ...]:
        """Bytes of each layer's matrices in the form that the kernels use."""
        return registry.layer_bytes(self.config, self.dtype, self.linear)

    def shard(self, topology: Topology) -> ModelConfig:
        """The configuration of one rank. Raises ConfigError if the model cannot be divided among so many
        ranks.
        """
        layers = self.stages(topology)[topology.stage] if topology.pipeline > 1 else None
        return sharding.shard(self.config, topology, layers)

    def stages(self, topology: Topology) -> tuple[Range, ...]:
        """The layers of each stage. Raises ConfigError if there are more stages than layers."""
        if topology.pipeline == 1:
            return (Range(0, self.config.num_layers),)
        head = registry.head_bytes(self.config, self.dtype, self.linear)
        return sharding.stages(self.config, topology, self.layer_bytes, head)

    def read(
        self,
        *,
        max_len: int,
        device: torch.device,
        on_progress: Callable[[int, int], None],
        host_layers: Collection[int] = (),
    ) -> Decoder:
        """Read the weights and return the model, ready to compute except for the matrices of ``host_layers``,
        which are on the host; on_progress(loaded bytes, total bytes) between chunks.
        """
        model = registry.build(
            self.config,
            max_len=max_len,
            dtype=self.dtype,
            device=device,
            linear=self.linear,
            host_layers=host_layers,
        )
        weights.read(self.files, self.shards, model.targets(), on_progress)
        model.finish()
        return model

    def read_shard(
        self,
        topology: Topology,
        communicator: Communicator,
        *,
        max_len: int,
        device: torch.device,
        on_progress: Callable[[int, int], None] = lambda loaded, total: None,
        host_layers: Collection[int] = (),
    ) -> Decoder:
        """Read one rank's part of the weights and nothing else; ``host_layers`` as in ``read``. Raises
        ConfigError if the model cannot be divided among so many ranks.
        """
        model = registry.build(
            self.shard(topology),
            max_len=max_len,
            dtype=self.dtype,
            device=device,
            linear=self.linear,
            host_layers=host_layers,
            communicator=communicator,
        )
        targets = model.targets()
        # Each file is verified whole by one rank of each node, which may have a copy of its own.
        weights.verify(self.files, self.shards[topology.local_rank :: topology.node_size])
        slices = sharding.slices(self.config, topology, registry.tensors(self.config, self.linear), targets)
        weights.read_slices(self.files, self.shards, targets, slices, on_progress)
        model.finish()
        return model


def dtype_name(wanted: str, stored: str, linear: LinearFactory, *, for_gpu: bool) -> str:
    """auto: bfloat16 on a GPU; on a CPU the checkpoint's dtype where it computes in it, float32 elsewhere.
    ``linear``: of the model; the kernels of rounded ones compute beside bfloat16 wherever they run.
    """
    if wanted == "auto":
        has_bf16 = (linear is not Linear and has_native_kernels()) or bool(
            torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )
        return "bfloat16" if for_gpu or (stored != "float32" and has_bf16) else "float32"
    if wanted not in DTYPES:
        raise ConfigError(f"dtype {wanted!r} is not supported; supported: auto, {', '.join(DTYPES)}.")
    return wanted


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """A draft model that fits the model and is not read yet."""

    checkpoint: Checkpoint
    block_size: int
    stored: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of its keys and values in one block. The offload tiers hold none of them."""
        return kv_cache.block_bytes(self.checkpoint.config, self.block_size, self.stored)

    def allocate(self, num_blocks: int, device: torch.device) -> tuple[Tensor, ...]:
        """Allocate caches with as many blocks as the model's."""
        config = self.checkpoint.config
        return kv_cache.allocate(config, num_blocks, self.block_size, dtype=self.stored, device=device)


def open_draft(
    model: Checkpoint, options: RunnerConfig, capability: int | None = None
) -> DraftCheckpoint | None:
    """Open the draft model that the options name, or return None. Raises ConfigError if it cannot draft for
    the model. ``capability``: of the GPU that computes both.
    """
    if options.speculative_model is None:
        return None
    found = open_as_draft(options.speculative_model, capability)
    refuse_misfit(model, found)
    wanted = options.max_model_len or model.config.max_position
    if found.config.max_position < wanted:
        raise ConfigError(
            f"The draft model has {found.config.max_position} positions, and the context may have {wanted} "
            f"tokens: set --max-model-len to {found.config.max_position} or less, or take another draft."
        )
    return DraftCheckpoint(
        found, options.block_size, kv_cache.storage_dtype(options.kv_cache_dtype, found.dtype)
    )


def open_as_draft(directory: Path, capability: int | None = None) -> Checkpoint:
    """Open a checkpoint with the fastest arithmetic there is: a wrong draft costs time and nothing else."""
    found = Checkpoint.open(directory, dtype="auto", quantization_name="auto", capability=capability)
    if capability is not None or found.quantization != "none" or not has_native_kernels():
        return found
    return Checkpoint.open(directory, dtype="auto", quantization_name="int8")


def refuse_misfit(model: Checkpoint, draft: Checkpoint) -> None:
    """Raise ConfigError unless both models have the same vocabulary."""
    if model.files.exists("tokenizer.json") or draft.files.exists("tokenizer.json"):
        refuse_other_vocabulary(model.files, draft.files)
    elif model.config.vocab_size != draft.config.vocab_size:
        raise ConfigError(
            f"The draft model has {draft.config.vocab_size} tokens and the model {model.config.vocab_size}. "
            "Take a draft with the same tokenizer."
        )


logger = logging.getLogger(__name__)

OnProgress = Callable[[int, int], None]


class Staging(NamedTuple):
    """A rank's part of the host's memory through which blocks of a GPU go to and come from other servers."""

    memory: Tensor  # u8
    num_slots: int


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its KV caches. ``device``: where the tensors are; None: the host. ``gpu_memory``: bytes by
    kind.
    """

    model: Decoder
    kv_caches: tuple[Tensor, ...]
    num_blocks: int
    max_model_len: int
    dtype: str
    quantization: str
    device: Device | None
    gpu_memory: Mapping[str, int]
    num_host_slots: int
    disk: DiskTier | None
    draft: Decoder | None
    draft_caches: tuple[Tensor, ...]
    kv_blocks: HostKVBlocks | None = None  # of all ranks, where rank 0 moves them between servers
    staging: Staging | None = None  # where these are not the caches themselves
    adapters: Adapters | None = None

    @property
    def num_pool_slots(self) -> int:
        """Blocks that the host has room for: of the host tier, or on their way between servers."""
        return self.num_host_slots if self.staging is None else self.staging.num_slots

    def offload_worker(self) -> OffloadWorker | None:
        """What copies blocks between the caches and the host; None: there are no such copies."""
        slots, device = self.num_pool_slots, self.device
        if not slots:
            return None
        memory, has_sums = None, self.staging is None
        if self.staging is not None:
            memory = self.staging.memory
        elif device is not None:
            block_bytes = sum(cache.nbytes // cache.shape[1] for cache in self.kv_caches)
            memory = torch.zeros(slots * block_bytes, dtype=torch.uint8)
            device.pin(memory, "--kv-offload-host-bytes")
        return OffloadWorker(self.kv_caches, slots, self.disk, memory, device=device, has_sums=has_sums)


def load_model(
    model_dir: Path,
    options: RunnerConfig,
    on_progress: OnProgress,
    device: Device | None,
    ranks: Membership = SINGLE,
) -> LoadedModel:
    """Open, check, read and place the model, or one rank's part of it; on_progress(loaded bytes, total bytes)
    between chunks.
    """
    place, capability, options = _place(device, options)
    found = Checkpoint.open(
        model_dir, dtype=options.dtype, quantization_name=options.quantization, capability=capability
    )
    draft = open_draft(found, options, capability) if ranks.topology.is_leader else None  # rank 0 drafts
    config = found.shard(ranks.topology)
    stored = kv_cache.storage_dtype(options.kv_cache_dtype, found.dtype)
    all_stages = replace(config, layers=found.config.layers)  # every rank counts the same blocks
    block_bytes = _block_bytes(all_stages, options, stored, draft)
    longest = kv_cache.longest_context(config, options)
    if device is None or memory_profile.is_size_given(options):
        _, longest = kv_cache.plan(config, options, block_bytes)  # else the memory left after loading decides
    num_host_slots, num_staged = _host_blocks(all_stages, options, stored, device)
    disk = _disk(config, all_stages, options, stored)
    total = found.size + (draft.checkpoint.size if draft is not None else 0)
    model = _read(found, options, device, longest, ranks, lambda n, _: on_progress(n, total))
    places = _adapters(model, found, options, device, ranks.topology)
    draft_model = None
    if draft is not None:
        draft_model = draft.checkpoint.read(
            max_len=longest, device=place, on_progress=lambda n, _: on_progress(found.size + n, total)
        )
    gpu_memory: Mapping[str, int] = {}
    if device is not None:
        measured = memory_profile.measure(model, options, device, stored, longest, draft_model, places)
        own_bytes = _block_bytes(config, options, stored, draft)  # of its stage
        options = memory_profile.sized(options, measured, config, own_bytes)
        gpu_memory = {"weights": measured.weights, "workspace": measured.workspace}
    num_blocks, max_model_len, shared = _plan(config, options, block_bytes, ranks, places)
    caches, kv_blocks, staging = _kv_caches(
        found, num_blocks, num_staged, options, stored, device, ranks.topology, shared
    )
    _log(device, found, model, draft)
    return LoadedModel(
        model,
        caches,
        num_blocks,
        max_model_len,
        found.dtype_name,
        found.quantization,
        device,
        gpu_memory,
        num_host_slots,
        disk,
        draft_model,
        () if draft is None else draft.allocate(num_blocks, place),
        kv_blocks,
        staging,
        places,
    )


def _adapters(
    model: Decoder, found: Checkpoint, options: RunnerConfig, device: Device | None, topology: Topology
) -> Adapters | None:
    """The places for LoRA adapters, if there are any."""
    if not options.max_adapters:
        return None
    place, matrices = None if device is None else device.place, None
    if topology.size > 1:
        whole = adapters.whole_matrices(registry.skeleton(found.config, found.linear))
        matrices = adapters.divided(whole, sharding.matrix_parts(found.config, topology), model)
    limits = options.max_adapters, options.max_adapter_rank
    return Adapters(model, *limits, found.dtype, place, matrices)


def _place(device: Device | None, options: RunnerConfig) -> tuple[torch.device, int | None, RunnerConfig]:
    """Where the tensors are, the compute capability there, and the options as they apply there."""
    if device is None:
        return torch.device("cpu"), None, options
    return device.place, device.capability, memory_profile.arithmetic(options, device.capability)


def _host_blocks(
    all_stages: ModelConfig, options: RunnerConfig, stored: torch.dtype, device: Device | None
) -> tuple[int, int]:
    """How many blocks the host has room for: in the tier below the cache, and on their way to and from a
    device.
    """
    sizes = {
        "kv-offload-host-bytes": options.kv_offload_host_bytes,
        "kv-staging-bytes": options.kv_staging_bytes if device is not None and options.shares_kv_cache else 0,
    }
    tier, staged = (
        kv_cache.offload_slots(size, flag, all_stages, options, stored) for flag, size in sizes.items()
    )
    return tier, staged


def _block_bytes(
    config: ModelConfig, options: RunnerConfig, stored: torch.dtype, draft: DraftCheckpoint | None
) -> int:
    """With the draft model's."""
    own = kv_cache.block_bytes(config, options.block_size, stored)
    return own if draft is None else own + draft.block_bytes


def _kv_caches(
    found: Checkpoint,
    num_blocks: int,
    num_staged: int,
    options: RunnerConfig,
    stored: torch.dtype,
    device: Device | None,
    topology: Topology,
    shared: int | None,
) -> tuple[tuple[Tensor, ...], HostKVBlocks | None, Staging | None]:
    """This rank's KV caches, and in rank 0 the blocks of all ranks that are in ``shared`` memory, if there is
    one: on CPUs those of the caches, on GPUs ``num_staged`` ones on their way.
    """
    config, size = found.shard(topology), options.block_size
    place = torch.device("cpu") if device is None else device.place
    allocate = partial(kv_cache.allocate, config, num_blocks, size, dtype=stored, device=place)
    if shared is None:
        return allocate(), None, None
    division = KVDivision(found.config.num_kv_heads, topology.tensor, found.stages(topology))
    head_bytes = size * kv_cache.row_bytes(config, stored)
    num_shared = num_blocks if device is None else min(num_staged, num_blocks)
    layout = KVMemory(division, num_shared, head_bytes, is_pool=device is not None)
    if device is not None and topology.is_leader:
        _check_staging(layout.size)
    blocks = HostKVBlocks(layout, shared)
    own, staging = blocks.of_rank(topology.rank), None
    if device is None:
        caches = allocate(memory=own)
    else:
        caches, staging = allocate(), Staging(torch.frombuffer(own, dtype=torch.uint8), num_shared)
        device.pin(staging.memory, "--kv-staging-bytes")
    if topology.is_leader:
        return caches, blocks, staging
    os.close(shared)
    return caches, None, staging


def _check_staging(size: int) -> None:
    """Refuse more than the host has left: all of it is taken at once, and what ended the process would not
    say why.
    """
    if size > (available := kv_cache.available_bytes()):
        raise ConfigError(
            f"--kv-staging-bytes takes {size >> 20} MiB of the host's memory, and {available >> 20} MiB are "
            "left beside the model: lower it, or give the server more memory."
        )


def _plan(
    config: ModelConfig,
    options: RunnerConfig,
    block_bytes: int,
    ranks: Membership,
    places: Adapters | None,
) -> tuple[int, int, int | None]:
    """(number of blocks, longest context), the same on every rank, and the descriptor of the memory for KV
    blocks of all of them, if they share one.
    """
    taken = 0
    if places is not None:
        given = (options.kv_cache_memory_bytes or 0) if places.is_on_host else 0
        most = kv_cache.useful_blocks(options, kv_cache.longest_context(config, options)) * block_bytes
        beside = options.kv_offload_host_bytes + min(given, most * options.tensor_parallel_size)
        local = ranks.topology.node_size  # ranks that share what is left
        taken = places.limit((kv_cache.available_bytes() - beside) // local) * local
    num_blocks, max_model_len = kv_cache.plan(config, options, block_bytes, taken)
    is_shared = options.shares_kv_cache and ranks.topology.is_leader
    shared = os.memfd_create("quire-kv") if is_shared else None
    if ranks.topology.size == 1:
        return num_blocks, max_model_len, shared
    num_blocks, shared = ranks.agree_on_blocks(num_blocks, shared)
    agreed = replace(options, num_blocks_override=num_blocks)
    return *kv_cache.plan(config, agreed, block_bytes), shared


def _read(
    found: Checkpoint,
    options: RunnerConfig,
    device: Device | None,
    longest: int,
    ranks: Membership,
    on_progress: OnProgress,
) -> Decoder:
    """Read the model, or one rank's part of it. With --cpu-offload-gb some layers' weights stay on the host
    and are streamed in each step: of several ranks of a stage each one's part of the same layers.
    """
    layers: tuple[int, ...] = ()
    if options.cpu_offload_gb:
        if device is None:
            raise ConfigError(
                "--cpu-offload-gb is for --device cuda: on a CPU all weights are in its memory."
            )
        part, stages = found.shard(ranks.topology), ranks.topology.pipeline
        sizes = found.layer_bytes[part.first_layer : part.first_layer + part.num_layers]
        layers = weight_offload.streamed_layers(sizes, options.cpu_offload_gb, stages)
    read = found.read
    if ranks.topology.size > 1:
        read = partial(found.read_shard, ranks.topology, ranks.communicator)
    place = torch.device("cpu") if device is None else device.place
    model = read(max_len=longest, device=place, on_progress=on_progress, host_layers=layers)
    if device is not None and layers:
        model.stream = WeightStream(model, layers, device)
    return model


def _log(device: Device | None, found: Checkpoint, model: Decoder, draft: DraftCheckpoint | None) -> None:
    logger.info(
        "model loaded",
        extra={
            "device": "cpu" if device is None else str(device.place),
            "dtype": found.dtype_name,
            "quantization": found.quantization,
            "streamed_bytes": model.streamed_bytes,
            "draft_model": "none" if draft is None else draft.checkpoint.arithmetic,
            "threads": torch.get_num_threads(),
            "native_kernels": native_kernels(),
        },
    )
    _log_dequantized(device, found, model)


def _log_dequantized(device: Device | None, found: Checkpoint, model: Decoder) -> None:
    """Say so if a GPU holds weights in more bytes than the checkpoint: it has no kernel for their format."""
    linears = [linear for layer in model.layers for linear in layer.linears]
    count = sum(isinstance(linear, Dequantized) for linear in linears)
    if device is not None and count:
        logger.warning(
            "weights are dequantised: no kernel of the GPU multiplies their format",
            extra={"format": found.quantization, "matrices": count, "of": len(linears), "bits": 16},
        )


def _disk(
    config: ModelConfig, all_stages: ModelConfig, options: RunnerConfig, dtype: torch.dtype
) -> DiskTier | None:
    """``config``: of the layers whose blocks this rank stores."""
    if (path := options.kv_offload_disk_path) is None:
        return None
    num_slots = kv_cache.offload_slots(
        options.kv_offload_disk_bytes, "kv-offload-disk-bytes", all_stages, options, dtype
    )
    try:
        return DiskTier(path, num_slots, kv_cache.block_bytes(config, options.block_size, dtype))
    except OSError as error:
        raise ConfigError(
            f"kv-offload-disk-path {path} cannot be written to ({error.strerror}): give another directory."
        ) from None
