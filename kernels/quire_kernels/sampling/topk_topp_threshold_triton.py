"""Triton kernels of `topk_topp_threshold`: a radix search for the threshold among few candidates, without a
sort.

Imported only where there is a GPU (why: `add_rmsnorm_triton`). The first kernel, many programs per row, finds
the largest value of each group of tokens. The second, one program per row, takes the value that as many
groups reach as tokens are wanted: all tokens that reach it, few more than wanted, are the candidates. Floats
map to integers in the same order; the threshold is the largest integer at and above which there is enough
mass, found two bits per sweep over the candidates. Where these do not suffice, as for a flat distribution, it
sweeps over the row instead, which stays in the L2 cache. Rows that exclude no token cost a comparison.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.launch_config import LaunchConfig

_CHUNK, _GROUP = 4096, 64
_WARPS, _ROW_WARPS = 8, 16
_CANDIDATES = 2048
_MOST_GROUPS = 1024  # that a candidate's bound is taken of: a larger top-k sweeps over the row
_NUCLEUS_GROUPS = 512  # of a top-p without top-k: the mass of the candidates usually suffices


def topk_topp_threshold_triton(
    logits: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    *,
    temperature: Tensor | None = None,
    min_p: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As ``topk_topp_threshold``. The elements of a row must be contiguous."""
    rows, vocab_size = logits.shape
    place = logits.device
    out = torch.empty(rows, dtype=torch.float32, device=place) if out is None else out
    if logits.stride(-1) != 1 or vocab_size == 0 or logits.dtype != torch.float32:
        raise ValueError("topk_topp_threshold: logits must be float32, adjacent elements a row, at least one")
    chunks = triton.cdiv(vocab_size, _CHUNK)
    maxima = torch.empty(rows, chunks * (_CHUNK // _GROUP), dtype=torch.float32, device=place)
    tops = torch.empty(rows, chunks, dtype=torch.float32, device=place)
    sums = torch.empty_like(tops)  # not a part of the same tensor: its address would not always be aligned
    candidates = torch.empty(rows, _CANDIDATES, dtype=torch.float32, device=place)
    scaled = torch.empty(rows, vocab_size, dtype=torch.float32, device=place)
    limits = (temperature, top_k, top_p, min_p)
    groups_kernel[(rows, chunks)](
        logits, *limits, scaled, maxima, tops, sums, logits.stride(0), vocab_size,
        CHUNK=_CHUNK, GROUP=_GROUP, num_warps=_WARPS,
    )  # fmt: skip
    threshold_kernel[(rows,)](
        scaled, *limits, maxima, tops, sums, candidates, out, vocab_size, chunks,
        CHUNK=_CHUNK, GROUP=_GROUP, CHUNKS=triton.next_power_of_2(chunks), CANDIDATES=_CANDIDATES,
        MOST=_MOST_GROUPS, USUAL=_NUCLEUS_GROUPS, num_warps=_ROW_WARPS,
    )  # fmt: skip
    return out


@triton.jit
def _limits(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row):
    """(top_k, top_p, min_p) of a row: off where it takes its largest logit."""
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    min_p = top_p * 0.0
    if min_p_ptr is not None:
        min_p = tl.load(min_p_ptr + row)
    if temperature_ptr is not None:
        is_drawn = tl.load(temperature_ptr + row) > 0
        top_k, top_p = tl.where(is_drawn, top_k, 0), tl.where(is_drawn, top_p, 1.0)
        min_p = tl.where(is_drawn, min_p, 0.0)
    return top_k, top_p, min_p


@triton.jit
def groups_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, scaled_ptr, maxima_ptr, tops_ptr, sums_ptr,
    logits_stride, vocab_size, CHUNK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Scaled logits; the largest of each group; of a chunk that, and the sum of exp(x - largest)."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    top_k, top_p, min_p = _limits(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row)
    if (top_k > 0) | (top_p < 1) | (min_p > 0):
        at = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits_ptr + row * logits_stride + at, mask=at < vocab_size, other=float("-inf"))
        if temperature_ptr is not None:
            x = tl.div_rn(x, tl.zeros([CHUNK], tl.float32) + tl.load(temperature_ptr + row))
        tl.store(scaled_ptr + row * vocab_size + at, x, mask=at < vocab_size)
        GROUPS: tl.constexpr = CHUNK // GROUP
        maxima = tl.max(tl.reshape(x, [GROUPS, GROUP]), 1)
        of_chunk = row * tl.num_programs(1) + chunk
        tl.store(maxima_ptr + of_chunk * GROUPS + tl.arange(0, GROUPS), maxima)
        top = tl.max(maxima, 0)
        base = tl.where(top == float("-inf"), 0.0, top)
        tl.store(tops_ptr + of_chunk, top)
        tl.store(sums_ptr + of_chunk, tl.sum(tl.exp(x - base), 0))


@triton.jit
def threshold_kernel(
    scaled_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, maxima_ptr, tops_ptr, sums_ptr,
    candidates_ptr, out_ptr, vocab_size, chunks, CHUNK: tl.constexpr, GROUP: tl.constexpr,
    CHUNKS: tl.constexpr, CANDIDATES: tl.constexpr, MOST: tl.constexpr, USUAL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    top_k, top_p, min_p = _limits(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row)
    threshold = tl.full([1], float("-inf"), tl.float32)
    if (top_k > 0) | (top_p < 1) | (min_p > 0):
        GROUPS: tl.constexpr = CHUNK // GROUP
        at = tl.arange(0, CHUNKS)
        tops = tl.load(tops_ptr + row * chunks + at, mask=at < chunks, other=float("-inf"))
        sums = tl.load(sums_ptr + row * chunks + at, mask=at < chunks, other=0.0)
        top = tl.max(tops, 0)
        if (top_k > 0) | (top_p < 1):
            given = scaled_ptr + row * vocab_size
            lowest = _key(tl.full([1], float("-inf"), tl.float32))
            wanted = tl.minimum(tl.where(top_k > 0, top_k, USUAL), vocab_size).to(tl.float32)
            maxima = maxima_ptr + row * chunks * GROUPS
            bound = lowest
            if wanted <= MOST:
                bound = _search(maxima, chunks * GROUPS, lowest, top, wanted, CHUNK, False)
                bound = tl.maximum(bound, lowest + 1)  # tokens that are forbidden are no candidates
            mine = candidates_ptr + row * CANDIDATES
            count = _collect(
                given,
                mine,
                tops_ptr + row * chunks,
                vocab_size,
                bound,
                wanted <= MOST,
                CHUNK,
                CANDIDATES,
            )
            cut = lowest
            if top_k > 0:
                if (wanted <= MOST) & (count <= CANDIDATES):
                    cut = _search(mine, count, lowest, top, wanted, CANDIDATES, False)
                else:
                    cut = _search(given, vocab_size, lowest, top, wanted, CHUNK, False)
                cut = tl.maximum(cut, lowest)
            if top_p < 1:
                whole = tl.sum(sums * tl.exp(tops - top), 0)
                held = _mass(mine, tl.minimum(count, CANDIDATES), cut, top, CANDIDATES)
                total = whole
                if top_k > 0:
                    total = held
                is_enough = (wanted <= MOST) & (count <= CANDIDATES) & (held >= top_p * total)
                if is_enough:
                    nucleus = _search(mine, count, cut, top, top_p * total, CANDIDATES, True)
                else:
                    if top_k > 0:
                        total = _row_mass(given, vocab_size, cut, top, CHUNK)
                    nucleus = _search(given, vocab_size, cut, top, top_p * total, CHUNK, True)
                # The search may end at a key below all kept tokens, which would readmit what top-k removed.
                cut = tl.maximum(cut, tl.minimum(nucleus, _key(tl.full([1], 0.0, tl.float32) + top)))
            threshold = _number(cut)
        threshold = tl.where(min_p > 0, tl.maximum(threshold, top + tl.log(min_p)), threshold)
    tl.store(out_ptr + row + tl.arange(0, 1), threshold)


@triton.jit
def _collect(
    given, mine, tops, vocab_size, bound, is_bounded, CHUNK: tl.constexpr,
    CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Write the values whose key is at least ``bound`` to ``mine``, in their order; how many there are, of
    which at most CANDIDATES are written.
    """
    count = 0
    if is_bounded:
        for first in range(0, vocab_size, CHUNK):
            if tl.max((_key(tl.load(tops + first // CHUNK + tl.arange(0, 1))) >= bound).to(tl.int32), 0) > 0:
                x = _block(given, first, vocab_size, CHUNK)
                is_candidate = (_key(x) >= bound).to(tl.int32)
                place = count + tl.cumsum(is_candidate, 0) - 1
                tl.store(mine + place, x, mask=(is_candidate > 0) & (place < CANDIDATES))
                count += tl.sum(is_candidate, 0)
        tl.debug_barrier()  # the program reads what its other threads have written
    return count


@triton.jit
def _block(given, first, size, BLOCK: tl.constexpr):
    """A block of values, -inf beyond the end."""
    at = first + tl.arange(0, BLOCK)
    return tl.load(given + at, mask=at < size, other=float("-inf"))


@triton.jit
def _mass(given, size, cut, top, BLOCK: tl.constexpr):
    """The sum of exp(x - top) of the first ``size`` values that are not below ``cut``."""
    at = tl.arange(0, BLOCK)
    x = tl.load(given + at, mask=at < size, other=float("-inf"))
    return tl.sum(tl.where((at < size) & (_key(x) >= cut), tl.exp(x - top), 0.0), 0)


@triton.jit
def _row_mass(given, vocab_size, cut, top, BLOCK: tl.constexpr):
    """The same of a whole row."""
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab_size, BLOCK):
        x = _block(given, first, vocab_size, BLOCK)
        total += tl.where(_key(x) >= cut, tl.exp(x - top), 0.0)
    return tl.sum(total, 0)


@triton.jit
def _search(given, size, cut, top, wanted, BLOCK: tl.constexpr, WEIGHED: tl.constexpr):
    """The largest key at and above which the values not below ``cut`` have a total weight >= ``wanted``; u32
    [1], 0 if all of them have less.

    A value's weight is exp(x - top) if WEIGHED, otherwise 1.
    """
    at = tl.arange(0, BLOCK)
    found = tl.zeros([1], tl.uint32)
    for step in range(16):
        shift = 30 - 2 * step
        one, two = (
            found + (tl.full([1], 1, tl.uint32) << shift),
            found + (tl.full([1], 2, tl.uint32) << shift),
        )
        three = found + (tl.full([1], 3, tl.uint32) << shift)
        over_one, over_two = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        over_three = tl.zeros([BLOCK], tl.float32)
        for first in range(0, size, BLOCK):
            inside = first + at < size
            x = _block(given, first, size, BLOCK)
            key = _key(x)
            weight = tl.exp(x - top) if WEIGHED else tl.full([BLOCK], 1.0, tl.float32)
            weight = tl.where(inside & (key >= cut), weight, 0.0)
            over_one += tl.where(key >= one, weight, 0.0)
            over_two += tl.where(key >= two, weight, 0.0)
            over_three += tl.where(key >= three, weight, 0.0)
        found = tl.where(
            tl.sum(over_three, 0) >= wanted, three,
            tl.where(tl.sum(over_two, 0) >= wanted, two, tl.where(tl.sum(over_one, 0) >= wanted, one, found)),
        )  # fmt: skip
    return found


@triton.jit
def _key(x):
    """u32 in the same order as the floats; both zeros map to one key."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _number(key):
    return tl.where(key >> 31 == 1, key ^ 0x80000000, key ^ 0xFFFFFFFF).to(tl.float32, bitcast=True)


_LIMITS = {"temperature_ptr": "*fp32", "top_k_ptr": "*i64", "top_p_ptr": "*fp32", "min_p_ptr": "*fp32"}
_OF_GROUPS = {"scaled_ptr": "*fp32", "maxima_ptr": "*fp32", "tops_ptr": "*fp32", "sums_ptr": "*fp32"}
_CONSTANTS: dict[str, object] = {"CHUNK": _CHUNK, "GROUP": _GROUP}

LAUNCH_CONFIGS = (
    LaunchConfig(
        "topk_topp_threshold, groups",
        groups_kernel,
        {"logits_ptr": "*fp32", **_LIMITS, **_OF_GROUPS, "logits_stride": "i32", "vocab_size": "i32"},
        _CONSTANTS,
        warps=_WARPS,
        aligned=frozenset({"logits_stride", "vocab_size"}),
        expects=("load128", "store128"),
        min_blocks=4,
    ),
    LaunchConfig(
        "topk_topp_threshold, of 32 chunks",
        threshold_kernel,
        {
            **_OF_GROUPS, **_LIMITS, "candidates_ptr": "*fp32", "out_ptr": "*fp32", "vocab_size": "i32",
            "chunks": "i32",
        },
        {
            **_CONSTANTS, "CHUNKS": 32, "CANDIDATES": _CANDIDATES, "MOST": _MOST_GROUPS,
            "USUAL": _NUCLEUS_GROUPS,
        },
        warps=_ROW_WARPS,
        aligned=frozenset({"vocab_size"}),
        expects=("load128",),
    ),
)  # fmt: skip
