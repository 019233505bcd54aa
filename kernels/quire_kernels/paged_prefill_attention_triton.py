"""`paged_prefill_attention` for CUDA tensors, imported only where there is a GPU (why: `add_rmsnorm_triton`).

A program takes some tokens of one chunk with all query heads of one KV head, so that a key is loaded once for
the group, and goes through the keys they see in tiles that are no matter of the cache's blocks (flash
attention 2). Which chunk is its own it finds in the bounds, so that nothing waits for the device.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.gpu_type import capability, type_name
from quire_kernels.kv_quantization import KVScales
from quire_kernels.tuned import PREFILL

MANY_ROWS = 64  # beyond as many, chunks count as long ones
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Tiling:
    """``rows`` of queries, each a token and a head, against ``tile`` keys."""

    rows: int
    tile: int
    warps: int
    stages: int


def prefill_tiling(head_size: int, rows: int, element_size: int, *, has_scales: bool = False) -> Tiling:
    """For chunks of so many rows, on average; ``element_size`` is that of the queries."""
    if head_size > 128 or element_size > 2:
        return Tiling(32 if has_scales else 64, 32, 8, 2)
    # What widens a cache takes registers.
    return Tiling(128 if rows > MANY_ROWS and not has_scales else 64, 64, 8, 2)


def paged_prefill_attention_triton(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_q: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    scales: KVScales | None = None,
    out: Tensor | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """As ``paged_prefill_attention``, ``scale`` positive. Tokens that no chunk holds are left alone."""
    tokens, num_heads, head_size = q.shape
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
        found = PREFILL.get((capability(q.device), head_size, type_name(k_cache.dtype), rows > MANY_ROWS))
        tiling = (
            prefill_tiling(head_size, rows, q.element_size(), has_scales=scales is not None)
            if found is None
            else Tiling(*found)
        )
    if group > tiling.rows:
        raise ValueError(f"paged attention: {group} query heads a KV head are more than {tiling.rows} rows")
    # Of every chunk's last tokens some may fill no whole program.
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
        # Exponents are of 2, and tanh is made of a sigmoid of twice its argument.
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
    """The last chunk whose programs begin at or before this one; each has one more than its tokens fill."""
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
    """Go through the tiles of [begin, end); of keys up to ``last`` some queries see not all where MASKED."""
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
        # Nothing is read of blocks' unused ends: they may hold what is not a number.
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
        # Where a query sees nothing yet; what is not a number stays so.
        base = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
        p = tl.exp2((scores if CAPPED else scores * scale) - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(p, 1)
        summed = summed * shrink[:, None]
        v = tl.load(v_ptr + place[:, None] + at[None, :], mask=loaded, other=0.0).to(q.dtype)
        if v_scales_ptr is not None:
            # By the tile's largest, so that the products stay within the range of the dtype.
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
    # The ends of prompts see the most keys: they go first.
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
        q = q.to(tl.float16)  # to which a GPU widens two float8 at once
    position = before + token
    last = tl.minimum(before + first + TOKENS, before + chunk)
    # Tiles of [full_begin, full_end) are seen whole by every query, those around them in part.
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
