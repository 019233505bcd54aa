"""Norms and rotary embedding of q and k, and the write of k and v to the paged cache. Called once per layer
by attention.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from quire_kernels.kv_quantization import KVScales, quantize_kv, write_kv
from quire_kernels.native import NATIVE
from quire_kernels.qk_norm import qk_norm

if torch.cuda.is_available():
    from quire_kernels.rope_kv_write_triton import rope_kv_write_triton


def rope_kv_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    scales: KVScales | None = None,
    norms: tuple[Tensor, Tensor, float] | None = None,
    cache_rows: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Rotate q and k of qkv [T, (Hq + 2 Hkv) D], store k and v, return q [T, Hq, D].

    ``cos`` and ``sin`` are float32 [P, R / 2] for the first R <= D of a head's dimensions (the others stay as
    they are), looked up at ``positions`` i64 [T]; without positions they
    are the tokens' own rows already. ``slots`` i64 [T] is block_id * block_size + offset. ``cache_rows``,
    asked where torch computes, spares it some arithmetic per layer: ``kv_cache_rows`` of the same slots. With
    ``scales``, k and v are quantised to the type of the caches. ``norms``, the weights of q and of k and
    their eps, are ``qk_norm``'s: before the rotation, and on the CPU in ``qkv`` itself.
    """
    if qkv.is_cuda:
        return rope_kv_write_triton(
            qkv, cos, sin, positions, slots, k_cache, v_cache, scales=scales, norms=norms
        )
    num_kv_heads, block_size, head_size = k_cache.shape[1:]
    if norms is not None:
        q_weight, k_weight, eps = norms
        qk_norm(qkv, q_weight, k_weight, eps, num_kv_heads)
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    heads = qkv.view(qkv.shape[0], -1, head_size)
    num_rotated = heads.shape[1] - num_kv_heads
    half = cos.shape[-1]
    if NATIVE is not None and 2 * half == head_size and NATIVE.takes(qkv, k_cache, v_cache):
        return NATIVE.rope_kv_write(qkv, cos.contiguous(), sin.contiguous(), slots, k_cache, v_cache)
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
    if scales is not None:
        fixed_k, fixed_v = scales.fixed or (None, None)
        keys, values = rotated[:, num_heads:], heads[:, num_rotated:]
        write_kv(k_cache, scales.keys, fixed_k, places, keys.reshape(-1, head_size))
        write_kv(v_cache, scales.values, fixed_v, places, values.reshape(-1, head_size))
        return rotated[:, :num_heads]
    k_cache.view(-1, head_size).index_copy_(0, places, rotated[:, num_heads:].reshape(-1, head_size))
    v_cache.view(-1, head_size).index_copy_(0, places, heads[:, num_rotated:].reshape(-1, head_size))
    return rotated[:, :num_heads]


def kv_cache_rows(slots: Tensor, num_kv_heads: int, block_size: int) -> Tensor:
    """i64 [T * Hkv]: where each token's heads lie in a cache seen as [num_blocks * Hkv * block_size, D]."""
    first = slots // block_size * (num_kv_heads * block_size) + slots % block_size
    return (first[:, None] + torch.arange(num_kv_heads, device=slots.device) * block_size).flatten()


def rope_kv_write_reference(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    scales: KVScales | None = None,
) -> Tensor:
    """x * cos + rotate_half(x) * sin in float32, then one indexed write. cos, sin: [T, R / 2]."""
    num_kv_heads, block_size, head_size = k_cache.shape[1:]
    heads = qkv.unflatten(1, (-1, head_size))
    num_rotated = heads.shape[1] - num_kv_heads
    x = heads[:, :num_rotated].float()
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = torch.cat((-second, first), dim=-1)
    both_cos, both_sin = torch.cat((cos, cos), -1)[:, None], torch.cat((sin, sin), -1)[:, None]
    turned = torch.cat((first, second), dim=-1) * both_cos + turned * both_sin
    rotated = torch.cat((turned, rest), dim=-1).to(qkv.dtype)
    block_ids, offsets = slots // block_size, slots % block_size
    keys, values = rotated[:, num_rotated - num_kv_heads :], heads[:, num_rotated:]
    if scales is not None:
        fixed_k, fixed_v = scales.fixed or (None, None)
        keys, scales.keys[block_ids, :, offsets] = quantize_kv(keys, k_cache.dtype, fixed_k)
        values, scales.values[block_ids, :, offsets] = quantize_kv(values, v_cache.dtype, fixed_v)
    k_cache[block_ids, :, offsets] = keys
    v_cache[block_ids, :, offsets] = values
    return rotated[:, : num_rotated - num_kv_heads]
