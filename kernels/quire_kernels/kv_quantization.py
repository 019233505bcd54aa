"""Keys and values in one byte each, with a scale for each token and head. Called by attention and by the ops
that write and read the cache.

A cache of dtype int8 or float8_e4m3fn is [2, num_blocks, Hkv, block_size, D + 4] bytes, and each block of a
head holds its data first, [block_size, D], and then its scales, f32 [block_size]: data stays aligned, and a
block moves between memories as one piece. A scale belongs to one token, and never changes afterwards: neither
chunks, nor who shares the block, nor what is appended to it changes what is read.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SCALE_BYTES = 4
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@dataclass(frozen=True, slots=True)
class KVScales:
    """``keys``, ``values`` f32 [num_blocks, Hkv, block_size]: x = stored * scale.

    ``fixed``: two numbers, f32 [], that the writer takes as scales of keys and values; None: each token's and
    head's own, by its largest element.
    """

    keys: Tensor
    values: Tensor
    fixed: tuple[Tensor, Tensor] | None = None


def is_quantized_kv(dtype: torch.dtype) -> bool:
    """Whether a cache of this type has scales."""
    return dtype in _LARGEST


def kv_row_size(head_size: int, dtype: torch.dtype) -> int:
    """Elements that one head of one token takes: its own, and the bytes of its scale."""
    return head_size + SCALE_BYTES if is_quantized_kv(dtype) else head_size


def open_kv_cache(
    cache: Tensor, fixed: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, KVScales | None]:
    """(keys, values, scales) of one layer's cache: views, the first two [num_blocks, Hkv, block_size, D].

    ``fixed`` scales are meant for e4m3; int8 has a narrower range, and takes each token's own.
    """
    keys, values = cache.unbind(0)
    if not is_quantized_kv(cache.dtype):
        return keys, values, None
    (keys, key_scales), (values, value_scales) = _split(keys), _split(values)
    scales = KVScales(key_scales, value_scales, fixed if cache.dtype == torch.float8_e4m3fn else None)
    return keys, values, scales


def _split(half: Tensor) -> tuple[Tensor, Tensor]:
    num_blocks, num_heads, block_size, row = half.shape
    head_size = row - SCALE_BYTES
    data, scales = half.view(num_blocks, num_heads, -1).split(
        [block_size * head_size, block_size * SCALE_BYTES], dim=-1
    )
    return data.unflatten(-1, (block_size, head_size)), scales.view(torch.float32)


def with_scales(
    k_cache: Tensor, v_cache: Tensor, scales: KVScales | None
) -> tuple[tuple[Tensor, Tensor | None], ...]:
    """Keys and values, each with its scales."""
    if scales is None:
        return (k_cache, None), (v_cache, None)
    return (k_cache, scales.keys), (v_cache, scales.values)


def quantize_kv(x: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [..., D] -> (stored [..., D], scales f32 [...]), so that stored * scale is near x.

    Saturates where a given ``scale`` is too small. What is not finite makes the whole head not a number.
    """
    largest = _LARGEST[dtype]
    x = x.float()
    scales = x.abs().amax(-1) / largest if scale is None else scale.float().expand(x.shape[:-1])
    scaled = (x / scales.clamp(min=torch.finfo(torch.float32).tiny)[..., None]).clamp_(-largest, largest)
    if dtype == torch.int8:
        scaled.round_()
    if scale is not None:
        scales = torch.where(x.isfinite().all(-1), scales, torch.nan)
    return scaled.to(dtype), scales


def write_kv(cache: Tensor, scales: Tensor, fixed: Tensor | None, rows: Tensor, x: Tensor) -> None:
    """Quantise x [N, D] into ``kv_cache_rows`` of a cache seen as [num_blocks * Hkv * block_size, D]."""
    stored, found = quantize_kv(x, cache.dtype, fixed)
    blocks, offsets = rows // cache.shape[2], rows % cache.shape[2]
    cache.flatten(0, 1)[blocks, offsets] = stored
    scales.flatten(0, 1)[blocks, offsets] = found


def gather_kv(cache: Tensor, scales: Tensor | None, index: Tensor, dtype: torch.dtype) -> Tensor:
    """[len(index), block_size * D]: blocks of one head each, which ``index`` counts head by head."""
    rows = cache.flatten(2).flatten(0, 1).index_select(0, index)
    if scales is None:
        return rows
    picked = scales.flatten(0, 1).index_select(0, index)
    return (rows.view(*picked.shape, -1).float() * picked[..., None]).to(dtype).flatten(1)


def read_kv(cache: Tensor, scales: Tensor | None, block_ids: Tensor) -> Tensor:
    """f32 [len(block_ids), Hkv, block_size, D], for the references."""
    blocks = cache[block_ids].float()
    return blocks if scales is None else blocks * scales[block_ids][..., None]
