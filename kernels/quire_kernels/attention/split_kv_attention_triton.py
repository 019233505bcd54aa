"""Triton kernels of decode and verification attention (flash decoding) over the paged KV cache.

Launched by `paged_decode_attention_triton` with one new token per sequence, and by
`paged_verify_attention_triton` with several. A program takes all query heads of one KV head, of all new
tokens, and one split of the sequence, so that each key is loaded once per split; a second kernel merges the
splits. The number of splits is fixed at launch, so that a captured CUDA graph stays valid while sequences
grow; each program computes the length of its split from the sequence's length.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.launch_config import (
    ALL_GPUS,
    FP8_GPUS,
    LaunchConfig,
    compute_capability,
    dtype_name,
    multiprocessors,
)
from quire_kernels.paged_kv_cache import PagedKVCache
from quire_kernels.tuned_configs import DECODE

MAX_SPLITS = 32  # with more, merging the splits costs more than they save
_LEAST_SPLITS, _LEAST_PART = 4, 256  # splits, tokens of each
TILE, WARPS, STAGES = 64, 4, 3
PROGRAMS = 2  # per multiprocessor
_SMALL_TILE = 32  # for quantized caches and many rows, which take registers
_MAX_ROWS = 64  # query rows per program; more rows are more programs, each of which loads the keys
REDUCE_WARPS = 4


def split_kv_attention(
    q: Tensor,
    kv: PagedKVCache,
    scale: float,
    *,
    window: int | None,
    softcap: float | None,
    tree: Tensor | None,
    out: Tensor,
    splits: int | None,
    tile: int | None,
    warps: int | None,
    stages: int | None,
) -> Tensor:
    """q and ``out`` [B, Q, Hq, D]; the other arguments as for ``paged_verify_attention_triton``."""
    sequences, queries, num_heads, head_size = q.shape
    k_cache, v_cache, scales = kv.cache.keys, kv.cache.values, kv.cache.scales
    block_table, seq_lens = kv.block_table, kv.seq_lens
    num_kv_heads, block_size = k_cache.shape[1:3]
    if num_heads % num_kv_heads or k_cache.shape[3] != head_size or out.shape != q.shape:
        raise ValueError(f"paged attention: q {list(q.shape)}, keys {list(k_cache.shape)} and out do not fit")
    if k_cache.stride() != v_cache.stride() or k_cache.stride()[2:] != (head_size, 1):
        raise ValueError("paged attention: a head's block must lie in one piece, and keys as values")
    if q.stride()[2:] != (head_size, 1) or out.stride()[2:] != (head_size, 1) or block_table.stride(-1) != 1:
        raise ValueError("paged attention: heads of q and out, and a table's blocks must be adjacent")
    rows = row_block(queries, num_heads // num_kv_heads)
    programs = PROGRAMS
    if tile is None or warps is None or stages is None:
        own = (TILE if scales is None and rows < _MAX_ROWS else _SMALL_TILE, WARPS, STAGES, PROGRAMS)
        key = (compute_capability(q.device), num_heads // num_kv_heads, head_size, dtype_name(k_cache.dtype))
        found = DECODE.get(key, own) if queries == 1 else own
        tile, warps, stages = tile or found[0], warps or found[1], stages or found[2]
        programs = found[3]
    groups = num_kv_heads * triton.cdiv(queries * (num_heads // num_kv_heads), rows)
    if splits is None:
        processors = multiprocessors(q)
        longest = block_table.shape[-1] * block_size
        splits = decode_splits(sequences, groups, longest, programs * processors, tile)
    if splits & (splits - 1) or not 0 < splits <= MAX_SPLITS:
        raise ValueError(f"paged attention: splits must be a power of two up to {MAX_SPLITS}: {splits}")
    parts, weights = out, None
    if splits > 1:
        shape = (sequences, queries, num_heads, splits)
        parts = torch.empty(*shape, head_size, dtype=torch.float32, device=q.device)
        weights = torch.empty(shape, dtype=torch.float32, device=q.device)
    window_or_0 = 0 if window is None else window
    size_block = triton.next_power_of_2(head_size)
    split_kernel[(sequences, groups, splits)](
        q,
        k_cache,
        v_cache,
        None if scales is None else scales.keys,
        None if scales is None else scales.values,
        block_table,
        seq_lens,
        tree,
        parts,
        weights,
        q.stride(0),
        q.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        0 if scales is None else scales.keys.stride(0),
        0 if scales is None else scales.keys.stride(1),
        block_table.stride(0),
        parts.stride(0),
        parts.stride(1),
        scale,
        window_or_0,
        0.0 if softcap is None else softcap,
        QUERIES=queries,
        GROUP=num_heads // num_kv_heads,
        ROWS=rows,
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
        reduce_kernel[(sequences * queries, num_heads)](
            parts, weights, seq_lens, out, parts.stride(1), out.stride(0), out.stride(1), window_or_0,
            QUERIES=queries, SIZE=head_size, SIZE_BLOCK=size_block, TILE=tile, SPLITS=splits,
            WINDOWED=window is not None, num_warps=REDUCE_WARPS,
        )  # fmt: skip
    return out


def row_block(queries: int, group: int) -> int:
    """Query rows per program: tensor cores take at least 16."""
    return min(max(16, int(triton.next_power_of_2(queries * group))), _MAX_ROWS)


def decode_splits(sequences: int, groups: int, longest: int, places: int, tile: int) -> int:
    """Splits of a sequence, so that the GPU can run ``places`` programs at once and each has a tile. Some at
    least, however many sequences there are, where they may become long: the step waits for the longest.
    """
    wanted = min(places // max(sequences * groups, 1), triton.cdiv(longest, tile), MAX_SPLITS)
    least = min(_LEAST_SPLITS, longest // _LEAST_PART)
    return min(int(triton.next_power_of_2(max(wanted, least, 1))), MAX_SPLITS)


@triton.jit
def _tiles(
    length, window, QUERIES: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, WINDOWED: tl.constexpr
):
    """(first visible token, first tile, tiles per split, splits that have any tiles)."""
    start = length * 0
    if WINDOWED:
        start = tl.maximum(length - (QUERIES - 1) - window, 0)
    first = start // TILE
    tiles = tl.cdiv(length, TILE) - first
    each = tl.maximum(tl.cdiv(tiles, SPLITS), 1)
    return start, first, each, tl.cdiv(tiles, each)


@triton.jit(do_not_specialize=["table_stride"])
def split_kernel(
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, lengths_ptr, tree_ptr, parts_ptr, weights_ptr,
    q_stride, q_token_stride, block_stride, head_stride, scale_block_stride, scale_head_stride, table_stride,
    parts_stride, parts_token_stride, scale, window, softcap,
    QUERIES: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    sequence, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    ROW_BLOCKS: tl.constexpr = (QUERIES * GROUP + ROWS - 1) // ROWS
    kv_head = tl.program_id(1) // ROW_BLOCKS
    row = tl.program_id(1) % ROW_BLOCKS * ROWS + tl.arange(0, ROWS)
    length = tl.load(lengths_ptr + sequence).to(tl.int32)
    start, first, each, _ = _tiles(length, window, QUERIES, TILE, SPLITS, WINDOWED)
    begin = (first + split * each) * TILE
    end = tl.minimum(begin + each * TILE, length)
    at, token = tl.arange(0, SIZE_BLOCK), tl.arange(0, TILE)
    in_group, in_head = row < QUERIES * GROUP, at < SIZE
    query = tl.zeros_like(row) if QUERIES == 1 else row // GROUP  # index among the new tokens
    head = kv_head * GROUP + row - query * GROUP
    inside = in_group[:, None] & in_head[None, :]
    q_at = q_ptr + sequence * q_stride + query[:, None] * q_token_stride + head[:, None] * SIZE + at[None, :]
    q = tl.load(q_at, mask=inside, other=0.0)
    if k_ptr.dtype.element_ty == tl.float8e4nv:
        q = q.to(tl.float16)  # GPUs convert FP8 to float16 in pairs
    before = length - QUERIES  # tokens before the new ones
    depth = query
    if tree_ptr is not None:
        seen_new = tl.load(tree_ptr + sequence * QUERIES + query, mask=in_group, other=0)
        depth = tl.sum(((seen_new[:, None] >> tl.arange(0, 64)[None, :]) & 1).to(tl.int32), 1) - 1
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, SIZE_BLOCK], tl.float32)
    for first_token in range(begin, end, TILE):
        position = first_token + token
        shown = position < end
        if BLOCK_SIZE % TILE == 0:
            block = tl.load(table_ptr + sequence * table_stride + first_token // BLOCK_SIZE).to(tl.int64)
        elif TILE % BLOCK_SIZE == 0:
            # A tile begins with a block: each of its block numbers is read once.
            number = first_token // BLOCK_SIZE + tl.arange(0, TILE // BLOCK_SIZE)
            held = number * BLOCK_SIZE < end
            numbers = tl.load(table_ptr + sequence * table_stride + number, mask=held, other=0).to(tl.int64)
            repeated = tl.broadcast_to(numbers[:, None], (TILE // BLOCK_SIZE, BLOCK_SIZE))
            block = tl.reshape(repeated, (TILE,))
        else:
            block = tl.load(
                table_ptr + sequence * table_stride + position // BLOCK_SIZE, mask=shown, other=0
            ).to(tl.int64)  # fmt: skip
        offset = position % BLOCK_SIZE
        place = block * block_stride + kv_head * head_stride + offset * SIZE
        loaded = shown[:, None]
        if SIZE != SIZE_BLOCK:
            loaded = loaded & in_head[None, :]
        # Unused slots of a block are not read: they may hold NaN.
        k = tl.load(k_ptr + place[:, None] + at[None, :], mask=loaded, other=0.0).to(q.dtype)
        v = tl.load(v_ptr + place[:, None] + at[None, :], mask=loaded, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if k_scales_ptr is not None:
            of_scale = block * scale_block_stride + kv_head * scale_head_stride + offset
            scores *= tl.load(k_scales_ptr + of_scale, mask=shown, other=0.0)[None, :]
        if CAPPED:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
        if QUERIES == 1:
            seen = (shown & (position >= start) if WINDOWED else shown)[None, :]
        else:
            new = position - before
            if tree_ptr is not None:
                bit = tl.minimum(tl.maximum(new, 0), 63)[None, :]
                seen = ((seen_new[:, None] >> bit) & 1) != 0
                seen = seen | (new < 0)[None, :]
            else:
                seen = new[None, :] <= query[:, None]
            if WINDOWED:
                seen = seen & (new[None, :] > depth[:, None] - window)
            seen = seen & shown[None, :]
        scores = tl.where(seen, scores * 1.4426950408889634, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        # A tile may lie before the window as a whole, with all scores -inf; NaN is propagated.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(p, 1)
        summed = summed * shrink[:, None]
        if v_scales_ptr is not None:
            # Divided by the tile's largest scale, so that the products stay within the range of the dtype.
            v_scale = tl.load(v_scales_ptr + of_scale, mask=shown, other=0.0)
            largest = tl.maximum(tl.max(v_scale, 0), 1.1754943508222875e-38)
            p = p * (v_scale / largest)[None, :]
            summed += tl.dot(p.to(v.dtype), v, input_precision="ieee") * largest
        else:
            summed = tl.dot(p.to(v.dtype), v, summed, input_precision="ieee")
        highest = higher
    some = tl.where(total == 0, 1.0, total)
    result = summed / some[:, None]
    row_at = parts_ptr + sequence * parts_stride + query * parts_token_stride
    if SPLITS == 1:
        place = row_at[:, None] + head[:, None] * SIZE + at[None, :]
        tl.store(place, result.to(parts_ptr.dtype.element_ty), mask=inside)
    else:
        part = head * SPLITS + split
        tl.store(row_at[:, None] + part[:, None] * SIZE + at[None, :], result, mask=inside)
        of_weight = (sequence * parts_stride + query * parts_token_stride) // SIZE + part
        tl.store(weights_ptr + of_weight, highest + tl.log2(total), mask=in_group)


@triton.jit
def reduce_kernel(
    parts_ptr, weights_ptr, lengths_ptr, out_ptr, parts_stride, out_stride, out_token_stride, window,
    QUERIES: tl.constexpr, SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr, TILE: tl.constexpr,
    SPLITS: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence, query = token // QUERIES, token % QUERIES
    length = tl.load(lengths_ptr + sequence).to(tl.int32)
    _, _, _, used = _tiles(length, window, QUERIES, TILE, SPLITS, WINDOWED)
    split, at = tl.arange(0, SPLITS), tl.arange(0, SIZE_BLOCK)
    there, in_head = split < used, at < SIZE
    part = head * SPLITS + split
    weight = tl.load(weights_ptr + token * (parts_stride // SIZE) + part, mask=there, other=float("-inf"))
    highest = tl.max(weight, 0)
    share = tl.exp2(weight - tl.where(highest == float("-inf"), 0.0, highest))
    parts = tl.load(
        parts_ptr + token * parts_stride + part[:, None] * SIZE + at[None, :],
        mask=there[:, None] & in_head[None, :],
        other=0.0,
    )
    total = tl.sum(share, 0)
    result = tl.sum(parts * share[:, None], 0) / tl.where(total == 0, 1.0, total)
    place = out_ptr + sequence * out_stride + query * out_token_stride + head * SIZE + at
    tl.store(place, result.to(out_ptr.dtype.element_ty), mask=in_head)


def split_launch_config(
    name: str, group: int, size: int, tile: int, warps: int, stages: int, *, queries: int = 1,
    cache: str = "bf16", splits: int = 8, block: int = 64, windowed: bool = False, capped: bool = False,
    tree: bool = False, min_blocks: int = 3,
) -> LaunchConfig:  # fmt: skip
    """A launch config of ``split_kernel``; its name starts with ``name``."""
    types = {
        "q_ptr": "*bf16", "k_ptr": f"*{cache}", "v_ptr": f"*{cache}", "table_ptr": "*i64",
        "lengths_ptr": "*i64",
        "parts_ptr": "*bf16" if splits == 1 else "*fp32", "q_stride": "i32", "q_token_stride": "i32",
        "block_stride": "i32", "head_stride": "i32", "scale_block_stride": "i32", "scale_head_stride": "i32",
        "table_stride": "i32", "parts_stride": "i32", "parts_token_stride": "i32", "scale": "fp32",
        "window": "i32", "softcap": "fp32",
    }  # fmt: skip
    types |= {"tree_ptr": "*i64"} if tree else {}
    types |= {"weights_ptr": "*fp32"} if splits > 1 else {}
    types |= {"k_scales_ptr": "*fp32", "v_scales_ptr": "*fp32"} if cache != "bf16" else {}
    constants = {
        "k_scales_ptr": None, "v_scales_ptr": None, "weights_ptr": None, "tree_ptr": None,
        "QUERIES": queries, "GROUP": group, "ROWS": row_block(queries, group), "SIZE": size,
        "SIZE_BLOCK": triton.next_power_of_2(size), "BLOCK_SIZE": block, "TILE": tile, "SPLITS": splits,
        "WINDOWED": windowed, "CAPPED": capped,
    }  # fmt: skip
    said = {"window": windowed, "cap": capped, "tree": tree, "1 split": splits == 1}
    what = "".join(f", {word}" for word, is_so in said.items() if is_so)
    strides = {
        "q_stride",
        "q_token_stride",
        "block_stride",
        "head_stride",
        "parts_stride",
        "parts_token_stride",
    }
    return LaunchConfig(
        f"{name} {group} x {size}, blocks of {block}, {cache}{what}: {tile}/{warps}/{stages}",
        split_kernel,
        types,
        {name: value for name, value in constants.items() if name not in types},
        warps=warps,
        stages=stages,
        aligned=frozenset(strides),
        expects=("mma", "async128"),
        min_blocks=min_blocks,
        gpus=FP8_GPUS if cache == "fp8e4nv" else ALL_GPUS,
    )


def reduce_launch_config(name: str, size: int, splits: int, queries: int = 1) -> LaunchConfig:
    """A launch config of ``reduce_kernel``."""
    types = {
        "parts_ptr": "*fp32", "weights_ptr": "*fp32", "lengths_ptr": "*i64", "out_ptr": "*bf16",
        "parts_stride": "i32", "out_stride": "i32", "out_token_stride": "i32", "window": "i32",
    }  # fmt: skip
    constants = {
        "QUERIES": queries, "SIZE": size, "SIZE_BLOCK": triton.next_power_of_2(size), "TILE": TILE,
        "SPLITS": splits, "WINDOWED": False,
    }  # fmt: skip
    return LaunchConfig(
        f"{name}, merge of {splits} splits of {size}", reduce_kernel, types, constants, warps=REDUCE_WARPS,
        aligned=frozenset({"parts_stride", "out_stride", "out_token_stride"}), expects=("load128",),
        min_blocks=8,
    )  # fmt: skip
