"""How many KV blocks there are, and the blocks. Called by ``runner.model_runner``."""

import torch
from torch import Tensor

from quire_server.core.errors import ConfigError
from quire_server.layers.attention import is_quantized_kv, kv_row_size
from quire_server.models.config import ModelConfig
from quire_server.runner import memory
from quire_server.runner.options import RunnerOptions

_SHARE = 0.5  # of the memory left after the model, where nobody said how much
_CEILING = 4 << 30
_MAX_SLOTS = 1 << 22  # of a lower tier: each takes some 200 bytes of account, however small its block
_STORED = {"auto": None, "fp8": torch.float8_e4m3fn, "int8": torch.int8}


def storage_dtype(name: str, compute: torch.dtype) -> torch.dtype:
    """What the cache holds: ``--kv-cache-dtype``, where auto is the type that the model computes in."""
    if name not in _STORED:
        raise ConfigError(f"kv-cache-dtype {name!r} is not supported; supported: {', '.join(_STORED)}.")
    return _STORED[name] or compute


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Keys and values of one block in all layers, and their scales where the type needs them."""
    row = kv_row_size(config.head_size, dtype) * dtype.itemsize
    return 2 * config.num_layers * config.num_kv_heads * block_size * row


def longest_context(config: ModelConfig, options: RunnerOptions) -> int:
    """Tokens of a sequence, if there is room for them."""
    wanted = options.max_model_len
    if wanted is not None and wanted > config.max_position:
        raise ConfigError(
            f"max-model-len {wanted} is more than the model's {config.max_position} positions. Lower it."
        )
    return wanted or config.max_position


def useful_blocks(options: RunnerOptions, longest: int) -> int:
    """As many as all sequences at full length could use."""
    return options.max_num_seqs * -(-longest // options.block_size)


def plan(config: ModelConfig, options: RunnerOptions, each: int) -> tuple[int, int]:
    """(number of blocks, longest context). Never more blocks than all sequences at full length could use.

    ``each``: bytes of a block, the draft model's included, for it keeps its own under the same number.
    """
    size, wanted_len = options.block_size, options.max_model_len
    longest = longest_context(config, options)
    useful = useful_blocks(options, longest)
    if options.num_blocks_override is not None:
        num_blocks = options.num_blocks_override
    elif options.kv_cache_memory_bytes is not None:
        num_blocks = min(useful, options.kv_cache_memory_bytes // each)
    else:
        room = max(0, memory.available_bytes() - options.kv_offload_host_bytes)
        num_blocks = min(useful, min(_CEILING, int(room * _SHARE)) // each)
    if num_blocks < 1:
        raise ConfigError(
            f"The KV cache has room for no block: one takes {each} bytes. Give the server more memory, "
            "or set --kv-cache-memory-bytes."
        )
    if wanted_len is not None and num_blocks * size < wanted_len:
        raise ConfigError(
            f"The KV cache holds {num_blocks * size} tokens, less than max-model-len {wanted_len}. "
            f"Lower max-model-len, or give the cache {-(-wanted_len // size) * each} bytes."
        )
    return num_blocks, min(longest, num_blocks * size)


def offload_slots(
    size: int, tier: str, config: ModelConfig, options: RunnerOptions, dtype: torch.dtype
) -> int:
    """Blocks that so many bytes of a lower tier hold, as far as they can be kept account of."""
    each = block_bytes(config, options.block_size, dtype)
    if 0 < size < each:
        raise ConfigError(f"kv-offload-{tier}-bytes {size} holds no block: one takes {each} bytes. Raise it.")
    return min(size // each, _MAX_SLOTS)


def allocate(
    config: ModelConfig, num_blocks: int, block_size: int, *, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """One [2, num_blocks, kv_heads, block_size, head_size] per layer: keys, then values. Types of one byte
    have room for a scale at the end of each row.

    Zeroed: a masked-out key still enters the arithmetic, where a stray NaN would spread.
    """
    if is_quantized_kv(dtype) and config.head_size % 4:
        raise ConfigError(
            f"A KV cache of {dtype} needs heads of a multiple of 4, and the model's have {config.head_size}. "
            "Leave kv-cache-dtype at auto."
        )
    shape = (2, num_blocks, config.num_kv_heads, block_size, kv_row_size(config.head_size, dtype))
    return tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers))
