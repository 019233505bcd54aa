"""QK norm, rotary embedding of q and k, and the write of k and v to the paged KV cache."""

from collections.abc import Callable

import torch
from torch import Tensor

from quire_kernels.cpu.native import NATIVE
from quire_kernels.norm.qk_norm import qk_norm
from quire_kernels.paged_kv_cache import KVCache
from quire_kernels.quantization.row_quantization import quantize_rows

if torch.cuda.is_available():
    from quire_kernels.attention.rope_kv_write_triton import rope_kv_write_triton


def rope_kv_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    slots: Tensor,
    cache: KVCache,
    *,
    norms: tuple[Tensor, Tensor, float] | None = None,
    cache_rows: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Rotate q and k of qkv [T, (Hq + 2 Hkv) D], write k and v to the cache, return q [T, Hq, D].

    ``cos`` and ``sin`` f32 [P, R / 2] rotate the first R <= D dimensions of a head and are looked up at
    ``positions`` i64 [T]; with positions None they are per token already, [T, R / 2]. ``slots`` i64 [T]:
    block_id * block_size + offset. k and v are quantized where the cache has scales. ``norms``: weight of q,
    weight of k, and eps of ``qk_norm``, applied before the rotation (on the CPU in place, in ``qkv``).
    ``cache_rows`` returns ``kv_cache_rows`` of the same slots; only the torch implementation calls it, so
    that the layers of a step compute it once.
    """
    if qkv.is_cuda:
        return rope_kv_write_triton(qkv, cos, sin, positions, slots, cache, norms=norms)
    num_kv_heads, block_size, head_size = cache.keys.shape[1:]
    if norms is not None:
        q_weight, k_weight, eps = norms
        qk_norm(qkv, q_weight, k_weight, eps, num_kv_heads)
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    heads = qkv.view(qkv.shape[0], -1, head_size)
    num_rotated = heads.shape[1] - num_kv_heads
    half = cos.shape[-1]
    if NATIVE is not None and 2 * half == head_size and NATIVE.supports(qkv, cache.keys, cache.values):
        return NATIVE.rope_kv_write(qkv, cos.contiguous(), sin.contiguous(), slots, cache)
    x = heads[:, :num_rotated].float()
    cos, sin = cos[:, None], sin[:, None]
    rotated = torch.empty_like(x, memory_format=torch.contiguous_format)
    torch.mul(x[..., :half], cos, out=rotated[..., :half]).addcmul_(x[..., half : 2 * half], sin, value=-1)
    torch.mul(x[..., half : 2 * half], cos, out=rotated[..., half : 2 * half]).addcmul_(x[..., :half], sin)
    if 2 * half < head_size:
        rotated[..., 2 * half :] = x[..., 2 * half :]
    rotated = rotated.to(qkv.dtype)
    places = kv_cache_rows(slots, num_kv_heads, block_size) if cache_rows is None else cache_rows()
    num_heads = num_rotated - num_kv_heads
    keys, values = (part.reshape(-1, head_size) for part in (rotated[:, num_heads:], heads[:, num_rotated:]))
    if cache.scales is not None:
        fixed_k, fixed_v = cache.scales.fixed or (None, None)
        _write_quantized(cache.keys, cache.scales.keys, fixed_k, places, keys)
        _write_quantized(cache.values, cache.scales.values, fixed_v, places, values)
        return rotated[:, :num_heads]
    cache.keys.view(-1, head_size).index_copy_(0, places, keys)
    cache.values.view(-1, head_size).index_copy_(0, places, values)
    return rotated[:, :num_heads]


def kv_cache_rows(slots: Tensor, num_kv_heads: int, block_size: int) -> Tensor:
    """i64 [T * Hkv]: rows of each token's heads in a cache seen as [num_blocks * Hkv * block_size, D]."""
    first = slots // block_size * (num_kv_heads * block_size) + slots % block_size
    return (first[:, None] + torch.arange(num_kv_heads, device=slots.device) * block_size).flatten()


def _write_quantized(data: Tensor, scales: Tensor, fixed: Tensor | None, rows: Tensor, x: Tensor) -> None:
    """Quantize x [N, D] into ``rows``, which are ``kv_cache_rows``, of keys or values."""
    stored, found = quantize_rows(x, data.dtype, fixed)
    blocks, offsets = rows // data.shape[2], rows % data.shape[2]
    data.flatten(0, 1)[blocks, offsets] = stored
    scales.flatten(0, 1)[blocks, offsets] = found


def rope_kv_write_reference(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    cache: KVCache,
) -> Tensor:
    """x * cos + rotate_half(x) * sin in float32, then one indexed write. cos, sin: [T, R / 2]."""
    num_kv_heads, block_size, head_size = cache.keys.shape[1:]
    heads = qkv.unflatten(1, (-1, head_size))
    num_rotated = heads.shape[1] - num_kv_heads
    x = heads[:, :num_rotated].float()
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    rotated_half = torch.cat((-second, first), dim=-1)
    both_cos, both_sin = torch.cat((cos, cos), -1)[:, None], torch.cat((sin, sin), -1)[:, None]
    halves = torch.cat((first, second), dim=-1) * both_cos + rotated_half * both_sin
    rotated = torch.cat((halves, rest), dim=-1).to(qkv.dtype)
    block_ids, offsets = slots // block_size, slots % block_size
    keys, values = rotated[:, num_rotated - num_kv_heads :], heads[:, num_rotated:]
    if cache.scales is not None:
        fixed_k, fixed_v = cache.scales.fixed or (None, None)
        where = (block_ids, slice(None), offsets)
        keys, cache.scales.keys[where] = quantize_rows(keys, cache.keys.dtype, fixed_k)
        values, cache.scales.values[where] = quantize_rows(values, cache.values.dtype, fixed_v)
    cache.keys[block_ids, :, offsets] = keys
    cache.values[block_ids, :, offsets] = values
    return rotated[:, : num_rotated - num_kv_heads]
