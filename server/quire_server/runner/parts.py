"""Everything that a ``ModelRunner`` is made of: the model read and placed, the caches as large as there is
room for. Called by ``ModelRunner.load``; settings that cannot work fail before the long part.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quire_server.core import weight_offload
from quire_server.core.errors import ConfigError
from quire_server.layers.int8_linear import has_native_kernels
from quire_server.models.config import ModelConfig
from quire_server.models.decoder import Decoder
from quire_server.runner import drafts, gpu_setup, kv_cache
from quire_server.runner.checkpoint import Checkpoint
from quire_server.runner.device import Device
from quire_server.runner.disk import Disk
from quire_server.runner.options import RunnerOptions
from quire_server.runner.weight_stream import WeightStream

logger = logging.getLogger(__name__)

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Parts:
    """``device``: where it all lies; None: on the host. ``gpu_memory``: bytes there by kind."""

    model: Decoder
    kv_caches: tuple[Tensor, ...]
    num_blocks: int
    max_model_len: int
    dtype: str
    quantization: str
    device: Device | None
    gpu_memory: Mapping[str, int]
    num_host_slots: int
    disk: Disk | None
    draft: Decoder | None
    draft_caches: tuple[Tensor, ...]


def assemble(
    model_dir: Path, options: RunnerOptions, on_progress: OnProgress, device: Device | None
) -> Parts:
    """Read, check and place the model; on_progress(loaded bytes, total bytes) between chunks."""
    place = torch.device("cpu") if device is None else device.place
    if device is not None:
        options = gpu_setup.arithmetic(options, device.capability)
    capability = None if device is None else device.capability
    found = Checkpoint.open(
        model_dir, dtype=options.dtype, quantization_name=options.quantization, capability=capability
    )
    draft = drafts.open_draft(found, options, capability)
    config = found.config
    stored = kv_cache.storage_dtype(options.kv_cache_dtype, found.dtype)
    block_bytes = kv_cache.block_bytes(config, options.block_size, stored)
    if draft is not None:
        block_bytes += draft.block_bytes
    longest = kv_cache.longest_context(config, options)
    if device is None or gpu_setup.is_told(options):
        _, longest = kv_cache.plan(config, options, block_bytes)  # what is left after loading decides
    num_host_slots = kv_cache.offload_slots(options.kv_offload_host_bytes, "host", config, options, stored)
    disk = _disk(config, options, stored)
    total = found.size + (draft.checkpoint.size if draft is not None else 0)
    model = _read(found, options, device, longest, lambda n, _: on_progress(n, total))
    draft_model = None
    if draft is not None:
        draft_model = draft.checkpoint.read(
            max_len=longest, device=place, on_progress=lambda n, _: on_progress(found.size + n, total)
        )
    gpu_memory: Mapping[str, int] = {}
    if device is not None:
        measured = gpu_setup.measure(model, options, device, stored, longest, draft=draft_model)
        options = gpu_setup.sized(options, measured, config, block_bytes)
        gpu_memory = {"weights": measured.weights, "workspace": measured.workspace}
    num_blocks, max_model_len = kv_cache.plan(config, options, block_bytes)
    caches = kv_cache.allocate(config, num_blocks, options.block_size, dtype=stored, device=place)
    _log(place, found, model, draft)
    return Parts(
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
    )


def _read(
    found: Checkpoint, options: RunnerOptions, device: Device | None, longest: int, on_progress: OnProgress
) -> Decoder:
    """The model; some layers' weights may stay on the host, and come to the device when it computes."""
    if not options.cpu_offload_gb:
        place = torch.device("cpu") if device is None else device.place
        return found.read(max_len=longest, device=place, on_progress=on_progress)
    if device is None:
        raise ConfigError("--cpu-offload-gb is for --device cuda: on a CPU all weights are in its memory.")
    layers = weight_offload.streamed_layers(found.layer_bytes, options.cpu_offload_gb)
    model = found.read(max_len=longest, device=device.place, on_progress=on_progress, host_layers=layers)
    model.stream = WeightStream(model, layers, device)
    return model


def _log(place: torch.device, found: Checkpoint, model: Decoder, draft: drafts.Draft | None) -> None:
    logger.info(
        "model loaded",
        extra={
            "device": str(place),
            "dtype": found.dtype_name,
            "quantization": found.quantization,
            "streamed_bytes": model.streamed_bytes,
            "draft_model": "none" if draft is None else draft.checkpoint.arithmetic,
            "threads": torch.get_num_threads(),
            "native_kernels": has_native_kernels(),
        },
    )


def _disk(config: ModelConfig, options: RunnerOptions, dtype: torch.dtype) -> Disk | None:
    if (path := options.kv_offload_disk_path) is None:
        return None
    num_slots = kv_cache.offload_slots(options.kv_offload_disk_bytes, "disk", config, options, dtype)
    try:
        return Disk(path, num_slots, kv_cache.block_bytes(config, options.block_size, dtype))
    except OSError as error:
        raise ConfigError(
            f"kv-offload-disk-path {path} cannot be written to ({error.strerror}): give another directory."
        ) from None
