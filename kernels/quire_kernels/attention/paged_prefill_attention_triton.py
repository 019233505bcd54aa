"""Triton kernel of `paged_prefill_attention` (flash attention 2), imported only where there is a GPU (why:
`add_rmsnorm_triton`).

A program takes some tokens of one chunk with all query heads of one KV head, so that a key is loaded once for
the group, and iterates over the visible keys in tiles, whose size is independent of the cache's block size.
It finds its chunk by bisection of the bounds on the device, so that the host need not wait for them.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.launch_config import (
    ALL_GPUS,
    FP8_GPUS,
    TRITON_TYPES,
    LaunchConfig,
    compute_capability,
    dtype_name,
)
from quire_kernels.paged_kv_cache import PagedKVCache
from quire_kernels.tuned_configs import PREFILL

MANY_ROWS = 64  # chunks with more query rows count as long
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Tiling:
    """``rows`` of queries (a token and a head each) times ``tile`` keys per iteration."""

    rows: int
    tile: int
    warps: int
    stages: int


def prefill_tiling(head_size: int, rows: int, element_size: int, *, has_scales: bool = False) -> Tiling:
    """Default tiling; ``rows``: mean query rows per chunk, ``element_size``: bytes of a query element."""
    if head_size > 128 or element_size > 2:
        return Tiling(32 if has_scales else 64, 32, 8, 2)
    if has_scales:
        return Tiling(64, 32, 8, 2)  # dequantization takes registers: a tile of 64 spills some on sm_90
    return Tiling(128 if rows > MANY_ROWS else 64, 64, 8, 2)


def paged_prefill_attention_triton(
    q: Tensor,
    kv: PagedKVCache,
    cu_q: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    out: Tensor | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """As ``paged_prefill_attention``; ``scale`` must be positive. Tokens outside chunks are not written."""
    tokens, num_heads, head_size = q.shape
    k_cache, v_cache, scales = kv.cache.keys, kv.cache.values, kv.cache.scales
    block_table, seq_lens = kv.block_table, kv.seq_lens
    num_kv_heads, block_size = k_cache.shape[1:3]
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    if num_heads % num_kv_heads or k_cache.shape[3] != head_size or out.shape != q.shape:
        raise ValueError(f"paged attention: q {list(q.shape)}, keys {list(k_cache.shape)} and out do not fit")
    if k_cache.stride() != v_cache.stride() or k_cache.stride()[2:] != (head_size, 1):
        raise ValueError("paged attention: a head's block must lie in one piece, and keys as values")
    if q.stride()[1:] != (head_size, 1) or out.stride()[1:] != (head_size, 1) or block_table.stride(-1) != 1:
        raise ValueError("paged attention: heads of q and out, and a table's blocks must be adjacent")
    if scale <= 0:
        raise ValueError(f"paged attention: scale must be positive: {scale}")
    sequences, group = seq_lens.shape[0], num_heads // num_kv_heads
    if not tokens or not sequences:
        return out
    if tiling is None:
        rows = tokens * group // sequences
        found = PREFILL.get(
            (compute_capability(q.device), head_size, dtype_name(k_cache.dtype), rows > MANY_ROWS)
        )
        tiling = (
            prefill_tiling(head_size, rows, q.element_size(), has_scales=scales is not None)
            if found is None
            else Tiling(*found)
        )
    if group > tiling.rows:
        raise ValueError(f"paged attention: {group} query heads a KV head are more than {tiling.rows} rows")
    # One more program per chunk: its last tokens may not fill one.
    programs = tokens // (tiling.rows // group) + sequences
    prefill_kernel[(programs, num_kv_heads)](
        q,
        k_cache,
        v_cache,
        None if scales is None else scales.keys,
        None if scales is None else scales.values,
        block_table,
        seq_lens,
        cu_q,
        out,
        sequences,
        q.stride(0),
        out.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        0 if scales is None else scales.keys.stride(0),
        0 if scales is None else scales.keys.stride(1),
        block_table.stride(0),
        # The kernel uses exp2, and computes tanh as a sigmoid of twice the argument.
        scale * _LOG2_E if softcap is None else 2 * scale / softcap,
        0.0 if softcap is None else softcap * _LOG2_E,
        0 if window is None else window,
        GROUP=group,
        SIZE=head_size,
        SIZE_BLOCK=triton.next_power_of_2(head_size),
        BLOCK_SIZE=block_size,
        ROWS=tiling.rows,
        TILE=tiling.tile,
        WINDOWED=window is not None,
        CAPPED=softcap is not None,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return out


@triton.jit
def _chunk_of(block, bounds_ptr, sequences, TOKENS: tl.constexpr):
    """The last chunk whose first program is at or before ``block``; each chunk has one spare program."""
    low = 0
    high = sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(bounds_ptr + middle) // TOKENS + middle <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _attend(
    q, highest, total, summed, begin, end, last, position, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr,
    table_ptr, block_stride, scale_block_stride, scale, softcap, window,
    SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Process the tiles of [begin, end). MASKED: some queries do not see all keys before ``last``."""
    at, token = tl.arange(0, SIZE_BLOCK), tl.arange(0, TILE)
    for first_token in range(begin, end, TILE):
        key = first_token + token
        there = key < last
        if BLOCK_SIZE % TILE == 0:
            block = tl.load(table_ptr + first_token // BLOCK_SIZE).to(tl.int64)
        else:
            block = tl.load(table_ptr + key // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
        place = block * block_stride + key % BLOCK_SIZE * SIZE
        loaded = there[:, None]
        if SIZE != SIZE_BLOCK:
            loaded = loaded & (at < SIZE)[None, :]
        # Unused slots of a block are not read: they may hold NaN.
        k = tl.load(k_ptr + place[:, None] + at[None, :], mask=loaded, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        of_scale = block * scale_block_stride + key % BLOCK_SIZE
        if k_scales_ptr is not None:
            scores *= tl.load(k_scales_ptr + of_scale, mask=there, other=0.0)[None, :]
        if CAPPED:
            scores = softcap * (2 * tl.sigmoid(scores * scale) - 1)
        if MASKED:
            seen = key[None, :] <= position[:, None]
            if WINDOWED:
                seen = seen & (key[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        largest = tl.max(scores, 1)
        higher = tl.maximum(highest, largest if CAPPED else largest * scale)
        # A query may have seen no key yet; NaN is propagated.
        base = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
        p = tl.exp2((scores if CAPPED else scores * scale) - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(p, 1)
        summed = summed * shrink[:, None]
        v = tl.load(v_ptr + place[:, None] + at[None, :], mask=loaded, other=0.0).to(q.dtype)
        if v_scales_ptr is not None:
            # Divided by the tile's largest scale, so that the products stay within the range of the dtype.
            v_scale = tl.load(v_scales_ptr + of_scale, mask=there, other=0.0)
            widest = tl.maximum(tl.max(v_scale, 0), 1.1754943508222875e-38)
            p = p * (v_scale / widest)[None, :]
            summed += tl.dot(p.to(v.dtype), v, input_precision="ieee") * widest
        else:
            summed = tl.dot(p.to(v.dtype), v, summed, input_precision="ieee")
        highest = higher
    return highest, total, summed


@triton.jit(do_not_specialize=["sequences", "table_stride"])
def prefill_kernel(
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, lengths_ptr, bounds_ptr, out_ptr,
    sequences, q_stride, out_stride, block_stride, head_stride, scale_block_stride, scale_head_stride,
    table_stride, scale, softcap, window,
    GROUP: tl.constexpr, SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = ROWS // GROUP
    # The ends of prompts attend to the most keys: they are scheduled first.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = _chunk_of(program, bounds_ptr, sequences, TOKENS)
    start = tl.load(bounds_ptr + sequence).to(tl.int32)
    chunk = tl.load(bounds_ptr + sequence + 1).to(tl.int32) - start
    first = (program - start // TOKENS - sequence) * TOKENS
    if first >= chunk:
        return
    before = tl.load(lengths_ptr + sequence).to(tl.int32) - chunk  # tokens before the chunk
    row, at = tl.arange(0, ROWS), tl.arange(0, SIZE_BLOCK)
    token = first + row // GROUP
    there = (token < chunk) & (row < TOKENS * GROUP)
    inside = there[:, None] & (at < SIZE)[None, :]
    head = (kv_head * GROUP + row % GROUP) * SIZE
    q_at = (start + token).to(tl.int64)[:, None] * q_stride + head[:, None] + at[None, :]
    q = tl.load(q_ptr + q_at, mask=inside, other=0.0)
    if k_ptr.dtype.element_ty == tl.float8e4nv:
        q = q.to(tl.float16)  # GPUs convert FP8 to float16 in pairs
    position = before + token
    last = tl.minimum(before + first + TOKENS, before + chunk)
    # Every query sees all keys of the tiles in [full_begin, full_end); the tiles around them are masked.
    begin, full_begin = last * 0, last * 0
    full_end = (before + first + 1) // TILE * TILE
    if WINDOWED:
        begin = tl.maximum(before + first + 1 - window, 0) // TILE * TILE
        full_begin = tl.cdiv(tl.maximum(last - window, 0), TILE) * TILE
        full_end = tl.where(full_begin < full_end, full_end, begin)
        full_begin = tl.minimum(full_begin, full_end)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, SIZE_BLOCK], tl.float32)
    k_ptr += kv_head.to(tl.int64) * head_stride
    v_ptr += kv_head.to(tl.int64) * head_stride
    table_ptr += sequence.to(tl.int64) * table_stride
    if k_scales_ptr is not None:
        k_scales_ptr += kv_head * scale_head_stride
        v_scales_ptr += kv_head * scale_head_stride
    if WINDOWED:
        highest, total, summed = _attend(
            q, highest, total, summed, begin, full_begin, last, position, k_ptr, v_ptr, k_scales_ptr,
            v_scales_ptr, table_ptr, block_stride, scale_block_stride, scale, softcap, window,
            SIZE, SIZE_BLOCK, BLOCK_SIZE, TILE, WINDOWED, CAPPED, True,
        )  # fmt: skip
    highest, total, summed = _attend(
        q, highest, total, summed, full_begin, full_end, last, position, k_ptr, v_ptr, k_scales_ptr,
        v_scales_ptr, table_ptr, block_stride, scale_block_stride, scale, softcap, window,
        SIZE, SIZE_BLOCK, BLOCK_SIZE, TILE, WINDOWED, CAPPED, False,
    )  # fmt: skip
    highest, total, summed = _attend(
        q, highest, total, summed, full_end, last, last, position, k_ptr, v_ptr, k_scales_ptr,
        v_scales_ptr, table_ptr, block_stride, scale_block_stride, scale, softcap, window,
        SIZE, SIZE_BLOCK, BLOCK_SIZE, TILE, WINDOWED, CAPPED, True,
    )  # fmt: skip
    result = summed / tl.where(total == 0, 1.0, total)[:, None]
    out_at = (start + token).to(tl.int64)[:, None] * out_stride + head[:, None] + at[None, :]
    tl.store(out_ptr + out_at, result.to(out_ptr.dtype.element_ty), mask=inside)


def _launch_config(
    group: int, size: int, tiling: Tiling, *, cache: str = "bf16", block: int = 64, windowed: bool = False,
    capped: bool = False, gpus: tuple[int, ...] = ALL_GPUS,
) -> LaunchConfig:  # fmt: skip
    types = {
        "q_ptr": "*bf16", "k_ptr": f"*{cache}", "v_ptr": f"*{cache}", "table_ptr": "*i64",
        "lengths_ptr": "*i64", "bounds_ptr": "*i64", "out_ptr": "*bf16", "sequences": "i32",
        "q_stride": "i32", "out_stride": "i32", "block_stride": "i32", "head_stride": "i32",
        "scale_block_stride": "i32", "scale_head_stride": "i32", "table_stride": "i32", "scale": "fp32",
        "softcap": "fp32", "window": "i32",
    }  # fmt: skip
    if cache != "bf16":
        types |= {"k_scales_ptr": "*fp32", "v_scales_ptr": "*fp32"}
    constants = {
        "k_scales_ptr": None, "v_scales_ptr": None, "GROUP": group, "SIZE": size,
        "SIZE_BLOCK": triton.next_power_of_2(size), "BLOCK_SIZE": block, "ROWS": tiling.rows,
        "TILE": tiling.tile, "WINDOWED": windowed, "CAPPED": capped,
    }  # fmt: skip
    what = (", window" if windowed else "") + (", cap" if capped else "")
    shape = f"{tiling.rows} x {tiling.tile}/{tiling.warps}/{tiling.stages}"
    return LaunchConfig(
        f"prefill {group} x {size}, blocks of {block}, {cache}{what}: {shape}",
        prefill_kernel,
        types,
        {name: value for name, value in constants.items() if name not in types},
        warps=tiling.warps,
        stages=tiling.stages,
        aligned=frozenset({"q_stride", "out_stride", "block_stride", "head_stride"}),
        expects=("mma", "async128"),
        gpus=tuple(gpu for gpu in gpus if cache != "fp8e4nv" or gpu in FP8_GPUS),
    )


_OWN = (
    _launch_config(4, 128, Tiling(128, 64, 8, 2)),
    _launch_config(4, 128, Tiling(128, 64, 8, 3)),
    _launch_config(4, 128, Tiling(64, 64, 8, 2)),
    _launch_config(4, 128, Tiling(128, 64, 8, 2), block=16),
    _launch_config(4, 128, Tiling(64, 32, 8, 2), cache="fp8e4nv"),
    _launch_config(4, 128, Tiling(64, 32, 8, 2), cache="i8"),
    _launch_config(3, 64, Tiling(128, 64, 8, 2)),
    _launch_config(1, 96, Tiling(128, 64, 8, 2)),
    _launch_config(1, 80, Tiling(128, 64, 8, 2)),
    _launch_config(2, 256, Tiling(64, 32, 8, 2), windowed=True, capped=True),
    _launch_config(2, 256, Tiling(32, 32, 8, 2), cache="i8"),
    _launch_config(2, 256, Tiling(32, 32, 8, 2), cache="fp8e4nv"),
    _launch_config(8, 128, Tiling(128, 64, 8, 2), windowed=True),
)
_TUNED = (  # with the GQA group of Llama 3
    _launch_config(4, size, Tiling(*tiling), cache=TRITON_TYPES[cache])
    for (_, size, cache, _), tiling in PREFILL.items()
)
LAUNCH_CONFIGS = tuple({each.name: each for each in (*_TUNED, *_OWN)}.values())
