"""Sizes and allocates the KV cache, and zeroes blocks that may contain NaN before they are reused."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quire_server.core.step import Step
from quire_server.errors import ConfigError
from quire_server.layers.attention import is_quantized_kv, kv_row_size
from quire_server.models.config import ModelConfig
from quire_server.runner.config import RunnerConfig
from quire_server.runner.input_batch import InputBatch

_SHARE = 0.5  # of the memory left after the model, unless the size is given
_CEILING = 4 << 30
_MAX_SLOTS = 1 << 22  # of an offload tier: each takes some 200 bytes of bookkeeping
_STORED = {"auto": None, "fp8": torch.float8_e4m3fn, "int8": torch.int8}


def storage_dtype(name: str, compute: torch.dtype) -> torch.dtype:
    """The type of keys and values in the cache: ``--kv-cache-dtype``; auto is the type that the model
    computes in.
    """
    if name not in _STORED:
        raise ConfigError(f"kv-cache-dtype {name!r} is not supported; supported: {', '.join(_STORED)}.")
    return _STORED[name] or compute


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block in all layers: keys, values, and scales where the type needs them."""
    return 2 * config.num_layers * config.num_kv_heads * block_size * row_bytes(config, dtype)


def row_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one head's key, or value, of one token."""
    return kv_row_size(config.head_size, dtype) * dtype.itemsize


def longest_context(config: ModelConfig, options: RunnerConfig) -> int:
    """Tokens of the longest sequence, if the cache has room for them."""
    wanted = options.max_model_len
    if wanted is not None and wanted > config.max_position:
        raise ConfigError(
            f"max-model-len {wanted} is more than the model's {config.max_position} positions. Lower it."
        )
    return wanted or config.max_position


def useful_blocks(options: RunnerConfig, longest: int) -> int:
    """The number of blocks that all sequences at full length would use."""
    return options.max_num_seqs * -(-longest // options.block_size)


def plan(config: ModelConfig, options: RunnerConfig, each: int, taken: int = 0) -> tuple[int, int]:
    """(number of blocks, longest context). At most as many blocks as all sequences at full length would use.

    ``each``: bytes of a block on one rank, including the draft model's, which is stored under the same id.
    ``taken``: bytes of the available memory that something else will take.
    """
    size, wanted_len, ranks = options.block_size, options.max_model_len, options.tensor_parallel_size
    longest = longest_context(config, options)
    useful = useful_blocks(options, longest)
    if options.num_blocks_override is not None:
        num_blocks = options.num_blocks_override
    elif options.kv_cache_memory_bytes is not None:
        num_blocks = min(useful, options.kv_cache_memory_bytes // ranks // each)
    else:
        room = max(0, available_bytes() - options.kv_offload_host_bytes - taken)
        num_blocks = min(useful, min(_CEILING, int(room * _SHARE)) // ranks // each)
    if num_blocks < 1:
        raise ConfigError(
            f"The KV cache has room for no block: one takes {each * ranks} bytes. Give the server more "
            "memory, or set --kv-cache-memory-bytes."
        )
    if wanted_len is not None and num_blocks * size < wanted_len:
        raise ConfigError(
            f"The KV cache holds {num_blocks * size} tokens, less than max-model-len {wanted_len}. "
            f"Lower max-model-len, or give the cache {-(-wanted_len // size) * each * ranks} bytes."
        )
    return num_blocks, min(longest, num_blocks * size)


def offload_slots(
    size: int, flag: str, config: ModelConfig, options: RunnerConfig, dtype: torch.dtype
) -> int:
    """The number of blocks that the ``size`` bytes of a flag hold, up to the number that can be tracked."""
    each = block_bytes(config, options.block_size, dtype) * options.tensor_parallel_size
    if 0 < size < each:
        raise ConfigError(f"{flag} {size} holds no block: one takes {each} bytes. Raise it.")
    return min(size // each, _MAX_SLOTS)


def allocate(
    config: ModelConfig,
    num_blocks: int,
    block_size: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    memory: memoryview | None = None,
) -> tuple[Tensor, ...]:
    """Allocate [2, num_blocks, kv_heads, block_size, head_size] per layer: keys, then values. One-byte types
    have room for a scale at the end of each row. ``memory``: zeros that are to have them, layer after layer.

    Zeroed, because a masked key still takes part in the arithmetic, where a NaN would spread.
    """
    if is_quantized_kv(dtype) and config.head_size % 4:
        raise ConfigError(
            f"A KV cache of {dtype} needs heads of a multiple of 4, and the model's have {config.head_size}. "
            "Leave kv-cache-dtype at auto."
        )
    shape = (2, num_blocks, config.num_kv_heads, block_size, kv_row_size(config.head_size, dtype))
    if memory is not None:
        each = math.prod(shape) * dtype.itemsize
        return tuple(
            torch.frombuffer(memory, dtype=torch.uint8, count=each, offset=layer * each)
            .view(dtype)
            .view(shape)
            for layer in range(config.num_layers)
        )
    return tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers))


@dataclass(frozen=True, slots=True)
class _Cgroup:
    limit: Path
    usage: Path
    stat: Path
    reclaimable: str  # key in ``stat`` of file pages that can be dropped, as those of a model just read


_ROOT = Path("/sys/fs/cgroup")
_CGROUPS = (
    _Cgroup(_ROOT / "memory.max", _ROOT / "memory.current", _ROOT / "memory.stat", "inactive_file"),
    _Cgroup(
        _ROOT / "memory/memory.limit_in_bytes",
        _ROOT / "memory/memory.usage_in_bytes",
        _ROOT / "memory/memory.stat",
        "total_inactive_file",
    ),
)


def available_bytes() -> int:
    """Memory that this process may still take: the smaller of MemAvailable and what the cgroup's limit
    leaves.
    """
    bounds = [_number(Path("/proc/meminfo"), "MemAvailable:") * 1024]
    for cgroup in _CGROUPS:
        try:
            limit, usage = int(cgroup.limit.read_text()), int(cgroup.usage.read_text())
            bounds.append(limit - usage + _number(cgroup.stat, cgroup.reclaimable))
        except (OSError, ValueError):
            continue  # another version of cgroups, or no limit ("max")
    return max(0, min(bounds))


def _number(path: Path, key: str) -> int:
    """The number behind a key in a file of "key number" lines; 0 if there is none."""
    lines = (line.split() for line in path.read_text().splitlines())
    return next((int(words[1]) for words in lines if words[:1] == [key]), 0)


class DirtyBlocks:
    """Blocks of rows whose logits contain NaN, until they are zeroed; for one set of caches [2, num_blocks,
    ...].

    A NaN must not remain behind the end of a sequence: attention masks the position, but still multiplies by
    it. A block is zeroed when it gets a new owner and not before, because other rows may share it.
    """

    def __init__(self, input_batch: InputBatch, kv_caches: tuple[Tensor, ...]) -> None:
        self._input_batch = input_batch
        self._kv_caches = kv_caches
        self._blocks: set[int] = set()

    def add(self, rows: Iterable[int]) -> None:
        """Mark all blocks that these rows have now."""
        for row in rows:
            self._blocks.update(
                self._input_batch.block_table[row, : self._input_batch.num_blocks[row]].tolist()
            )

    def zero_reused(self, step: Step) -> None:
        """Zero the marked blocks that the step assigns to a row."""
        if not self._blocks:
            return
        starts = dict(zip(step.rows, step.starts, strict=True))
        size = self._input_batch.block_size
        assigned = {block_id for _, block_id in step.new_blocks}
        for row in step.started:
            cached = -(-starts.get(row.row, len(row.token_ids)) // size)
            assigned.update(row.block_ids[cached:])
        dirty = sorted(assigned & self._blocks)
        if dirty:
            for cache in self._kv_caches:
                cache[:, torch.tensor(dirty)] = 0
            self._blocks.difference_update(dirty)
