"""`paged_decode_attention` for CUDA tensors, imported only where there is a GPU (why: `add_rmsnorm_triton`).

A program takes the query heads of one KV head and one part of the sequence, so that every key is loaded once
(flash decoding); a second kernel weighs the parts together. The number of parts is the launch's, so that a
captured graph stays right while sequences grow; how long a part is, each program finds out by itself.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.configuration import ALL_GPUS, FP8_GPUS, Configuration
from quire_kernels.kv_quantization import KVScales

MAX_SPLITS = 32  # beyond it, weighing the parts costs more than they bring
_TILE, _QUANTISED_TILE, _WARPS, _STAGES = 64, 32, 4, 3  # scales take registers
_REDUCE_WARPS = 4


def paged_decode_attention_triton(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    scales: KVScales | None = None,
    out: Tensor | None = None,
    splits: int | None = None,
    tile: int | None = None,
    warps: int = _WARPS,
    stages: int = _STAGES,
) -> Tensor:
    """As ``paged_decode_attention``; a row of length 0, as padding has it, gives zeros.

    ``splits``: parts of a sequence, a power of two, by default what fills the GPU; ``tile``: tokens at once.
    ``warps`` and ``stages`` as ``CONFIGURATIONS`` has them.
    """
    sequences, num_heads, head_size = q.shape
    num_kv_heads, block_size = k_cache.shape[1:3]
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    if num_heads % num_kv_heads or k_cache.shape[3] != head_size:
        raise ValueError(
            f"paged_decode_attention: q {list(q.shape)} and keys {list(k_cache.shape)} do not fit"
        )
    if k_cache.stride() != v_cache.stride() or k_cache.stride()[2:] != (head_size, 1):
        raise ValueError("paged_decode_attention: a head's block must lie in one piece, and keys as values")
    if q.stride()[1:] != (head_size, 1) or out.stride()[1:] != (head_size, 1) or block_table.stride(-1) != 1:
        raise ValueError("paged_decode_attention: heads of q and out, and a table's blocks must be adjacent")
    if tile is None:
        tile = _TILE if scales is None else _QUANTISED_TILE
    if splits is None:
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
        splits = decode_splits(sequences, num_kv_heads, block_table.shape[-1] * block_size, processors, tile)
    if splits & (splits - 1) or not 0 < splits <= MAX_SPLITS:
        raise ValueError(
            f"paged_decode_attention: splits must be a power of two up to {MAX_SPLITS}: {splits}"
        )
    group = num_heads // num_kv_heads
    parts, weights = out, None
    if splits > 1:
        parts = torch.empty(sequences, num_heads, splits, head_size, dtype=torch.float32, device=q.device)
        weights = torch.empty(sequences, num_heads, splits, dtype=torch.float32, device=q.device)
    size_block = triton.next_power_of_2(head_size)
    decode_kernel[(sequences, num_kv_heads, splits)](
        q,
        k_cache,
        v_cache,
        None if scales is None else scales.keys,
        None if scales is None else scales.values,
        block_table,
        seq_lens,
        parts,
        weights,
        q.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        0 if scales is None else scales.keys.stride(0),
        0 if scales is None else scales.keys.stride(1),
        block_table.stride(0),
        parts.stride(0),
        scale,
        0 if window is None else window,
        0.0 if softcap is None else softcap,
        GROUP=group,
        GROUP_BLOCK=max(16, triton.next_power_of_2(group)),
        SIZE=head_size,
        SIZE_BLOCK=size_block,
        BLOCK_SIZE=block_size,
        TILE=tile,
        SPLITS=splits,
        WINDOWED=window is not None,
        CAPPED=softcap is not None,
        num_warps=warps,
        num_stages=stages,
    )
    if weights is not None:
        reduce_kernel[(sequences, num_heads)](
            parts, weights, seq_lens, out, parts.stride(0), out.stride(0), 0 if window is None else window,
            SIZE=head_size, SIZE_BLOCK=size_block, TILE=tile, SPLITS=splits, WINDOWED=window is not None,
            num_warps=_REDUCE_WARPS,
        )  # fmt: skip
    return out


def decode_splits(sequences: int, kv_heads: int, longest: int, processors: int, tile: int) -> int:
    """Parts of a sequence, so that two programs find a place on each multiprocessor and each has a tile."""
    wanted = min(2 * processors // max(sequences * kv_heads, 1), triton.cdiv(longest, tile), MAX_SPLITS)
    return min(int(triton.next_power_of_2(max(wanted, 1))), MAX_SPLITS)


@triton.jit
def _tiles(length, window, TILE: tl.constexpr, SPLITS: tl.constexpr, WINDOWED: tl.constexpr):
    """(first visible token, first tile, tiles a part, parts that have any)."""
    start = length * 0
    if WINDOWED:
        start = tl.maximum(length - window, 0)
    first = start // TILE
    tiles = tl.cdiv(length, TILE) - first
    each = tl.maximum(tl.cdiv(tiles, SPLITS), 1)
    return start, first, each, tl.cdiv(tiles, each)


@triton.jit
def decode_kernel(
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, lengths_ptr, parts_ptr, weights_ptr,
    q_stride, block_stride, head_stride, scale_block_stride, scale_head_stride, table_stride, parts_stride,
    scale, window, softcap,
    GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    sequence, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths_ptr + sequence).to(tl.int32)
    start, first, each, _ = _tiles(length, window, TILE, SPLITS, WINDOWED)
    begin = (first + split * each) * TILE
    end = tl.minimum(begin + each * TILE, length)
    row, at, token = tl.arange(0, GROUP_BLOCK), tl.arange(0, SIZE_BLOCK), tl.arange(0, TILE)
    in_group, in_head = row < GROUP, at < SIZE
    head = kv_head * GROUP + row
    q_at = q_ptr + sequence * q_stride + head[:, None] * SIZE + at[None, :]
    q = tl.load(q_at, mask=in_group[:, None] & in_head[None, :], other=0.0)
    if k_ptr.dtype.element_ty == tl.float8e4nv:
        q = q.to(tl.float16)  # to which a GPU widens two float8 at once
    highest = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    summed = tl.zeros([GROUP_BLOCK, SIZE_BLOCK], tl.float32)
    for first_token in range(begin, end, TILE):
        position = first_token + token
        shown = position < end
        block = tl.load(
            table_ptr + sequence * table_stride + position // BLOCK_SIZE, mask=shown, other=0
        ).to(tl.int64)  # fmt: skip
        offset = position % BLOCK_SIZE
        place = block * block_stride + kv_head * head_stride + offset * SIZE
        loaded = shown[:, None]
        if SIZE != SIZE_BLOCK:
            loaded = loaded & in_head[None, :]
        # Nothing is read of blocks' unused ends: they may hold what is not a number.
        k = tl.load(k_ptr + place[:, None] + at[None, :], mask=loaded, other=0.0).to(q.dtype)
        v = tl.load(v_ptr + place[:, None] + at[None, :], mask=loaded, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if k_scales_ptr is not None:
            of_scale = block * scale_block_stride + kv_head * scale_head_stride + offset
            scores *= tl.load(k_scales_ptr + of_scale, mask=shown, other=0.0)[None, :]
        if CAPPED:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
        seen = shown & (position >= start) if WINDOWED else shown
        scores = tl.where(seen[None, :], scores * 1.4426950408889634, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        # Before the window there may be a whole tile of nothing; what is not a number stays so.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(p, 1)
        summed = summed * shrink[:, None]
        if v_scales_ptr is not None:
            # By the tile's largest, so that the products stay within the range of the dtype.
            v_scale = tl.load(v_scales_ptr + of_scale, mask=shown, other=0.0)
            largest = tl.maximum(tl.max(v_scale, 0), 1.1754943508222875e-38)
            p = p * (v_scale / largest)[None, :]
            summed += tl.dot(p.to(v.dtype), v, input_precision="ieee") * largest
        else:
            summed = tl.dot(p.to(v.dtype), v, summed, input_precision="ieee")
        highest = higher
    some = tl.where(total == 0, 1.0, total)
    result = summed / some[:, None]
    inside = in_group[:, None] & in_head[None, :]
    if SPLITS == 1:
        place = parts_ptr + sequence * parts_stride + head[:, None] * SIZE + at[None, :]
        tl.store(place, result.to(parts_ptr.dtype.element_ty), mask=inside)
    else:
        part = head * SPLITS + split
        tl.store(
            parts_ptr + sequence * parts_stride + part[:, None] * SIZE + at[None, :], result, mask=inside
        )
        tl.store(
            weights_ptr + sequence * (parts_stride // SIZE) + part, highest + tl.log2(total), mask=in_group
        )


@triton.jit
def reduce_kernel(
    parts_ptr, weights_ptr, lengths_ptr, out_ptr, parts_stride, out_stride, window,
    SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lengths_ptr + sequence).to(tl.int32)
    _, _, _, used = _tiles(length, window, TILE, SPLITS, WINDOWED)
    split, at = tl.arange(0, SPLITS), tl.arange(0, SIZE_BLOCK)
    there, in_head = split < used, at < SIZE
    part = head * SPLITS + split
    weight = tl.load(weights_ptr + sequence * (parts_stride // SIZE) + part, mask=there, other=float("-inf"))
    highest = tl.max(weight, 0)
    share = tl.exp2(weight - tl.where(highest == float("-inf"), 0.0, highest))
    parts = tl.load(
        parts_ptr + sequence * parts_stride + part[:, None] * SIZE + at[None, :],
        mask=there[:, None] & in_head[None, :],
        other=0.0,
    )
    total = tl.sum(share, 0)
    result = tl.sum(parts * share[:, None], 0) / tl.where(total == 0, 1.0, total)
    place = out_ptr + sequence * out_stride + head * SIZE + at
    tl.store(place, result.to(out_ptr.dtype.element_ty), mask=in_head)


def _configuration(
    group: int, size: int, tile: int, warps: int, stages: int, *, cache: str = "bf16", splits: int = 8,
    block: int = 64, windowed: bool = False, capped: bool = False, min_blocks: int = 3,
) -> Configuration:  # fmt: skip
    types = {
        "q_ptr": "*bf16", "k_ptr": f"*{cache}", "v_ptr": f"*{cache}", "table_ptr": "*i64",
        "lengths_ptr": "*i64",
        "parts_ptr": "*bf16" if splits == 1 else "*fp32", "q_stride": "i32", "block_stride": "i32",
        "head_stride": "i32", "scale_block_stride": "i32", "scale_head_stride": "i32", "table_stride": "i32",
        "parts_stride": "i32", "scale": "fp32", "window": "i32", "softcap": "fp32",
    }  # fmt: skip
    if splits > 1:
        types["weights_ptr"] = "*fp32"
    if cache != "bf16":
        types |= {"k_scales_ptr": "*fp32", "v_scales_ptr": "*fp32"}
    constants = {
        "k_scales_ptr": None, "v_scales_ptr": None, "weights_ptr": None, "GROUP": group,
        "GROUP_BLOCK": max(16, triton.next_power_of_2(group)), "SIZE": size,
        "SIZE_BLOCK": triton.next_power_of_2(size), "BLOCK_SIZE": block, "TILE": tile, "SPLITS": splits,
        "WINDOWED": windowed, "CAPPED": capped,
    }  # fmt: skip
    what = (", window" if windowed else "") + (", cap" if capped else "") + (", whole" if splits == 1 else "")
    return Configuration(
        f"decode {group} x {size}, blocks of {block}, {cache}{what}: {tile}/{warps}/{stages}",
        decode_kernel,
        types,
        {name: value for name, value in constants.items() if name not in types},
        warps=warps,
        stages=stages,
        aligned=frozenset({"q_stride", "block_stride", "head_stride", "parts_stride"}),
        expects=("mma", "async128"),
        min_blocks=min_blocks,
        gpus=FP8_GPUS if cache == "fp8e4nv" else ALL_GPUS,
    )


def _reduction(size: int, splits: int) -> Configuration:
    types = {
        "parts_ptr": "*fp32", "weights_ptr": "*fp32", "lengths_ptr": "*i64", "out_ptr": "*bf16",
        "parts_stride": "i32", "out_stride": "i32", "window": "i32",
    }  # fmt: skip
    constants = {
        "SIZE": size, "SIZE_BLOCK": triton.next_power_of_2(size), "TILE": _TILE, "SPLITS": splits,
        "WINDOWED": False,
    }  # fmt: skip
    return Configuration(
        f"decode, {splits} parts of {size} weighed", reduce_kernel, types, constants, warps=_REDUCE_WARPS,
        aligned=frozenset({"parts_stride", "out_stride"}), expects=("load128",), min_blocks=8,
    )  # fmt: skip


CONFIGURATIONS = (
    _configuration(4, 128, 64, 4, 3),
    _configuration(4, 128, 64, 4, 3, splits=1),
    _configuration(4, 128, 64, 4, 3, block=16),
    _configuration(4, 128, 32, 4, 2),
    _configuration(4, 128, 64, 4, 5),
    _configuration(4, 128, 128, 8, 3, min_blocks=2),
    _configuration(4, 128, 32, 4, 3, cache="fp8e4nv"),
    _configuration(4, 128, 32, 4, 3, cache="i8"),
    _configuration(3, 64, 64, 4, 3),
    _configuration(1, 96, 64, 4, 3),
    _configuration(1, 80, 64, 4, 3),
    _configuration(2, 256, 64, 4, 3, windowed=True, capped=True, min_blocks=2),
    _configuration(8, 128, 64, 4, 3, windowed=True),
    _reduction(128, 32),
    _reduction(256, 8),
)
