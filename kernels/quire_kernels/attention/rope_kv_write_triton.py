"""Triton kernel of `rope_kv_write`: QK norm, rotation, quantization and the cache write in one launch.

Imported only where there is a GPU (why: `add_rmsnorm_triton`). A program takes eight heads of one token;
value heads are neither normalized nor rotated.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.launch_config import ALL_GPUS, FP8_GPUS, LaunchConfig
from quire_kernels.paged_kv_cache import KVCache
from quire_kernels.quantization.row_quantization import LARGEST

_HEADS_BLOCK, _WARPS = 8, 2


def rope_kv_write_triton(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    slots: Tensor,
    cache: KVCache,
    *,
    norms: tuple[Tensor, Tensor, float] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As ``rope_kv_write``; a token with a negative slot (padding) is not stored."""
    k_cache, v_cache, scales = cache.keys, cache.values, cache.scales
    num_kv_heads, block_size, head_size = k_cache.shape[1:]
    tokens, width = qkv.shape
    num_heads = width // head_size - 2 * num_kv_heads
    half = cos.shape[-1]
    if width % head_size or num_heads <= 0 or 2 * half > head_size:
        raise ValueError(
            f"rope_kv_write: no fit: qkv of {width}, caches of {num_kv_heads} x {head_size}, {half} angles"
        )
    if (
        k_cache.stride() != v_cache.stride()
        or k_cache.stride()[2:] != (head_size, 1)
        or cos.stride() != sin.stride()
    ):
        raise ValueError(
            "rope_kv_write: a head's block must lie in one piece, and keys as values, cos as sin"
        )
    if cos.stride(-1) != 1 or qkv.stride(-1) != 1 or slots.stride(-1) != 1:
        raise ValueError(
            "rope_kv_write: rows of qkv, cos and sin must hold adjacent elements, and so must slots"
        )
    if out is None:
        out = torch.empty(tokens, num_heads, head_size, dtype=qkv.dtype, device=qkv.device)
    if out.stride()[1:] != (head_size, 1):
        raise ValueError("rope_kv_write: a token's heads in out must lie side by side")
    fixed = (None, None) if scales is None or scales.fixed is None else scales.fixed
    q_norm, k_norm, eps = (None, None, 0.0) if norms is None else norms
    rest = head_size - 2 * half
    rope_kv_write_kernel[(tokens, triton.cdiv(num_heads + 2 * num_kv_heads, _HEADS_BLOCK))](
        qkv,
        cos,
        sin,
        positions,
        slots,
        q_norm,
        k_norm,
        out,
        k_cache,
        v_cache,
        None if scales is None else scales.keys,
        None if scales is None else scales.values,
        *fixed,
        qkv.stride(0),
        cos.stride(0),
        out.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        0 if scales is None else scales.keys.stride(0),
        0 if scales is None else scales.keys.stride(1),
        eps,
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        SIZE=head_size,
        HALF=half,
        BLOCK_SIZE=block_size,
        LARGEST=0.0 if scales is None else LARGEST[k_cache.dtype],
        HEADS_BLOCK=_HEADS_BLOCK,
        HALF_BLOCK=triton.next_power_of_2(half),
        REST_BLOCK=triton.next_power_of_2(rest) if rest else 0,
        num_warps=_WARPS,
    )
    return out


@triton.jit
def rope_kv_write_kernel(
    qkv_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, q_norm_ptr, k_norm_ptr, q_ptr, k_ptr, v_ptr,
    k_scales_ptr, v_scales_ptr, k_fixed_ptr, v_fixed_ptr,
    qkv_stride, angle_stride, q_stride, block_stride, head_stride, scale_block_stride, scale_head_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, LARGEST: tl.constexpr, HEADS_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
    there = head < HEADS + 2 * KV_HEADS
    is_q = head < HEADS
    is_k = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_v = (head >= HEADS + KV_HEADS) & there
    slot = tl.load(slots_ptr + token).to(tl.int64)
    at = tl.arange(0, HALF_BLOCK)
    in_half = at < HALF
    given = qkv_ptr + token * qkv_stride + head[:, None] * SIZE
    shown = there[:, None] & in_half[None, :]
    x1 = tl.load(given + at[None, :], mask=shown, other=0.0).to(tl.float32)
    x2 = tl.load(given + HALF + at[None, :], mask=shown, other=0.0).to(tl.float32)
    if REST_BLOCK > 0:
        after = 2 * HALF + tl.arange(0, REST_BLOCK)
        in_rest = there[:, None] & (after < SIZE)[None, :]
        x3 = tl.load(given + after[None, :], mask=in_rest, other=0.0).to(tl.float32)
    if q_norm_ptr is not None:
        squares = tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)
        if REST_BLOCK > 0:
            squares += tl.sum(x3 * x3, 1)
        inverse = tl.rsqrt(squares / SIZE + eps)
        x1 = _normed(x1, inverse, q_norm_ptr, k_norm_ptr, at, in_half, is_q, is_v, qkv_ptr)
        x2 = _normed(x2, inverse, q_norm_ptr, k_norm_ptr, HALF + at, in_half, is_q, is_v, qkv_ptr)
        if REST_BLOCK > 0:
            x3 = _normed(x3, inverse, q_norm_ptr, k_norm_ptr, after, after < SIZE, is_q, is_v, qkv_ptr)
    row = token
    if positions_ptr is not None:
        row = tl.load(positions_ptr + token).to(tl.int64)
    cos = tl.load(cos_ptr + row * angle_stride + at, mask=in_half, other=0.0)[None, :]
    sin = tl.load(sin_ptr + row * angle_stride + at, mask=in_half, other=0.0)[None, :]
    # Rounded to the model's dtype first, so that quantized caches start from the same numbers as others.
    y1 = tl.where(is_v[:, None], x1, x1 * cos - x2 * sin).to(qkv_ptr.dtype.element_ty)
    y2 = tl.where(is_v[:, None], x2, x2 * cos + x1 * sin).to(qkv_ptr.dtype.element_ty)
    q = q_ptr + token * q_stride + head[:, None] * SIZE
    tl.store(q + at[None, :], y1, mask=is_q[:, None] & in_half[None, :])
    tl.store(q + HALF + at[None, :], y2, mask=is_q[:, None] & in_half[None, :])
    if REST_BLOCK > 0:
        y3 = x3.to(qkv_ptr.dtype.element_ty)
        tl.store(q + after[None, :], y3, mask=is_q[:, None] & in_rest)
    if slot >= 0:
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        kv_head = tl.where(is_k, head - HEADS, head - HEADS - KV_HEADS).to(tl.int64)
        place = block * block_stride + kv_head[:, None] * head_stride + offset * SIZE
        if LARGEST > 0:
            largest = tl.maximum(_largest(y1), _largest(y2))
            is_finite = _finite(y1) & _finite(y2)
            if REST_BLOCK > 0:
                largest = tl.maximum(largest, _largest(y3))
                is_finite = is_finite & _finite(y3)
            if k_fixed_ptr is not None:
                scale = tl.where(
                    is_k, tl.load(k_fixed_ptr).to(tl.float32), tl.load(v_fixed_ptr).to(tl.float32)
                )
            else:
                scale = tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32))
            # NaN and infinity must read back as NaN.
            kept = tl.where(is_finite, scale, float("nan"))
            of_scale = block * scale_block_stride + kv_head * scale_head_stride + offset
            tl.store(k_scales_ptr + of_scale, kept, mask=is_k)
            tl.store(v_scales_ptr + of_scale, kept, mask=is_v)
            divisor = tl.maximum(scale, 1.1754943508222875e-38)
            z1 = _quantised(y1, divisor, LARGEST, k_ptr)
            z2 = _quantised(y2, divisor, LARGEST, k_ptr)
        else:
            z1, z2 = y1.to(k_ptr.dtype.element_ty), y2.to(k_ptr.dtype.element_ty)
        k, v = k_ptr + place, v_ptr + place
        of_k, of_v = is_k[:, None] & in_half[None, :], is_v[:, None] & in_half[None, :]
        tl.store(k + at[None, :], z1, mask=of_k)
        tl.store(k + HALF + at[None, :], z2, mask=of_k)
        tl.store(v + at[None, :], z1, mask=of_v)
        tl.store(v + HALF + at[None, :], z2, mask=of_v)
        if REST_BLOCK > 0:
            z3 = y3.to(k_ptr.dtype.element_ty)
            if LARGEST > 0:
                z3 = _quantised(y3, divisor, LARGEST, k_ptr)
            tl.store(k + after[None, :], z3, mask=is_k[:, None] & in_rest)
            tl.store(v + after[None, :], z3, mask=is_v[:, None] & in_rest)


@triton.jit
def _normed(x, inverse, q_norm_ptr, k_norm_ptr, at, inside, is_q, is_v, qkv_ptr):
    """As ``qk_norm``: rounded to the weight's dtype, multiplied by it, rounded to the dtype of qkv."""
    q_weight = tl.load(q_norm_ptr + at, mask=inside, other=0.0)
    k_weight = tl.load(k_norm_ptr + at, mask=inside, other=0.0)
    weight = tl.where(is_q[:, None], q_weight[None, :].to(tl.float32), k_weight[None, :].to(tl.float32))
    normed = (x * inverse[:, None]).to(q_weight.dtype).to(tl.float32) * weight
    return tl.where(is_v[:, None], x, normed.to(qkv_ptr.dtype.element_ty).to(tl.float32))


@triton.jit
def _largest(x):
    return tl.max(tl.abs(x.to(tl.float32)), 1)


@triton.jit
def _finite(x):
    return tl.min((tl.abs(x.to(tl.float32)) < float("inf")).to(tl.int32), 1) > 0


@triton.jit
def _quantised(x, divisor, LARGEST: tl.constexpr, cache_ptr):
    scaled = tl.div_rn(x.to(tl.float32), tl.broadcast_to(divisor[:, None], x.shape))
    scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
    if LARGEST == 127.0:
        # Round half to even: adding 1.5 * 2 ** 23 leaves no fraction bits.
        scaled = (scaled + 12582912.0) - 12582912.0
    return scaled.to(cache_ptr.dtype.element_ty)


def _launch_config(
    heads: int,
    kv_heads: int,
    size: int,
    *,
    cache: str = "bf16",
    half: int | None = None,
    norm: str | None = None,
) -> LaunchConfig:
    """By default the whole head is rotated; ``norm``: the dtype of the norm weights."""
    half = size // 2 if half is None else half
    rest = size - 2 * half
    types = {
        "qkv_ptr": "*bf16", "cos_ptr": "*fp32", "sin_ptr": "*fp32", "slots_ptr": "*i64", "q_ptr": "*bf16",
        "k_ptr": f"*{cache}", "v_ptr": f"*{cache}", "qkv_stride": "i32", "angle_stride": "i32",
        "q_stride": "i32", "block_stride": "i32", "head_stride": "i32", "scale_block_stride": "i32",
        "scale_head_stride": "i32", "eps": "fp32",
    }  # fmt: skip
    if cache != "bf16":
        types |= {"k_scales_ptr": "*fp32", "v_scales_ptr": "*fp32"}
    if norm is not None:
        types |= {"q_norm_ptr": f"*{norm}", "k_norm_ptr": f"*{norm}"}
    constants = {
        "positions_ptr": None, "k_fixed_ptr": None, "v_fixed_ptr": None, "k_scales_ptr": None,
        "v_scales_ptr": None, "q_norm_ptr": None, "k_norm_ptr": None,
        "HEADS": heads, "KV_HEADS": kv_heads, "SIZE": size, "HALF": half,
        "BLOCK_SIZE": 16, "LARGEST": {"bf16": 0.0, "i8": 127.0, "fp8e4nv": 448.0}[cache],
        "HEADS_BLOCK": _HEADS_BLOCK, "HALF_BLOCK": triton.next_power_of_2(half),
        "REST_BLOCK": triton.next_power_of_2(rest) if rest else 0,
    }  # fmt: skip
    what = ("" if rest == 0 else f", {2 * half} rotated") + ("" if norm is None else f", norm weight {norm}")
    return LaunchConfig(
        f"rope_kv_write {heads}/{kv_heads} heads of {size}{what}, cache {cache}",
        rope_kv_write_kernel,
        types,
        {name: value for name, value in constants.items() if name not in types},
        warps=_WARPS,
        aligned=frozenset({"qkv_stride", "angle_stride", "q_stride", "block_stride", "head_stride"}),
        expects=("load128",),
        min_blocks=8,
        gpus=FP8_GPUS if cache == "fp8e4nv" else ALL_GPUS,
    )


LAUNCH_CONFIGS = (
    _launch_config(32, 8, 128),
    _launch_config(32, 8, 128, cache="fp8e4nv"),
    _launch_config(32, 8, 128, cache="i8"),
    _launch_config(32, 8, 128, norm="bf16"),
    _launch_config(8, 4, 256, norm="fp32"),
    _launch_config(9, 3, 64),
    _launch_config(32, 32, 80, half=16),
    _launch_config(32, 32, 96),
)
