"""The paged KV cache as the ops take it: `KVCache`, one layer's memory; `PagedKVCache`, a batch's view of it.

One layer's cache of a float dtype is [2, num_blocks, Hkv, block_size, D]: keys, then values. A quantized one
(int8 or float8_e4m3fn) is [2, num_blocks, Hkv, block_size, D + 4] bytes: each block of a head holds its data,
[block_size, D], followed by its scales, f32 [block_size]. This keeps the data aligned, and a block moves
between memories in one piece. Each token and head has its own scale, which never changes once written, so
what is read back depends neither on chunking nor on prefix sharing nor on what is appended to the block.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SCALE_BYTES = 4
_QUANTIZED = (torch.int8, torch.float8_e4m3fn)


@dataclass(frozen=True, slots=True)
class KVScales:
    """Scales of a quantized cache, f32 [num_blocks, Hkv, block_size] each: x = stored * scale.

    ``fixed``: the checkpoint's scales for keys and values, f32 [] each, which the writer uses instead of
    computing a scale from the largest element of each token and head.
    """

    keys: Tensor
    values: Tensor
    fixed: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True, slots=True)
class KVCache:
    """One layer's cache: ``keys``, ``values`` [num_blocks, Hkv, block_size, D], ``scales`` if quantized."""

    keys: Tensor
    values: Tensor
    scales: KVScales | None = None

    def with_scales(self) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
        """((keys, their scales), (values, their scales))."""
        if self.scales is None:
            return (self.keys, None), (self.values, None)
        return (self.keys, self.scales.keys), (self.values, self.scales.values)


@dataclass(frozen=True, slots=True)
class PagedKVCache:
    """What attention reads: a layer's cache, and which of its blocks hold the sequences of a batch.

    ``block_table`` i64 [B, blocks] lists each sequence's blocks in order; entries past its end may repeat any
    of them. ``seq_lens`` i64 [B] counts each sequence's tokens, the new ones included.
    """

    cache: KVCache
    block_table: Tensor
    seq_lens: Tensor


def is_quantized_kv(dtype: torch.dtype) -> bool:
    """Whether a cache of this dtype has scales."""
    return dtype in _QUANTIZED


def kv_row_size(head_size: int, dtype: torch.dtype) -> int:
    """Elements that one head of one token takes: its own, and the bytes of its scale."""
    return head_size + SCALE_BYTES if is_quantized_kv(dtype) else head_size


def open_kv_cache(cache: Tensor, fixed: tuple[Tensor, Tensor] | None = None) -> KVCache:
    """Views of one layer's cache.

    ``fixed`` scales are used for e4m3 only: int8 has a narrower range and always computes its scales.
    """
    keys, values = cache.unbind(0)
    if not is_quantized_kv(cache.dtype):
        return KVCache(keys, values)
    (keys, key_scales), (values, value_scales) = _split(keys), _split(values)
    scales = KVScales(key_scales, value_scales, fixed if cache.dtype == torch.float8_e4m3fn else None)
    return KVCache(keys, values, scales)


def _split(half: Tensor) -> tuple[Tensor, Tensor]:
    """(data, scales) of the bytes of all keys, or of all values."""
    num_blocks, num_heads, block_size, row = half.shape
    head_size = row - SCALE_BYTES
    data, scales = half.view(num_blocks, num_heads, -1).split(
        [block_size * head_size, block_size * SCALE_BYTES], dim=-1
    )
    return data.unflatten(-1, (block_size, head_size)), scales.view(torch.float32)


def gather_kv(data: Tensor, scales: Tensor | None, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy blocks of single heads to [len(index), block_size * D].

    ``index`` i64: rows of the cache seen as [num_blocks * Hkv, block_size * D].
    """
    rows = data.flatten(2).flatten(0, 1).index_select(0, index)
    if scales is None:
        return rows
    picked = scales.flatten(0, 1).index_select(0, index)
    return (rows.view(*picked.shape, -1).float() * picked[..., None]).to(dtype).flatten(1)


def read_kv(data: Tensor, scales: Tensor | None, block_ids: Tensor) -> Tensor:
    """Dequantized blocks, f32 [len(block_ids), Hkv, block_size, D], for the references."""
    blocks = data[block_ids].float()
    return blocks if scales is None else blocks * scales[block_ids][..., None]
