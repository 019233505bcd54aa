"""The attention cases of `roofline`, over the paged KV cache."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from bench.gpu.case import Case
from bench.gpu.place import Launch
from bench.gpu.sizes import Sizes
from quire_kernels import (
    PagedKVCache,
    kv_row_size,
    open_kv_cache,
    paged_decode_attention,
    paged_prefill_attention,
    paged_verify_attention,
)

_BF16, _FP8 = torch.bfloat16, torch.float8_e4m3fn
Op = Callable[..., object]
_DRAFTED = 5  # tokens of a sequence that are verified together


def paged_kv_cache(
    sizes: Sizes, device: torch.device, sequences: int, length: int, dtype: torch.dtype
) -> PagedKVCache:
    """Sequences of one length in a cache of their own, blocks in random order."""
    blocks = -(-length // sizes.block)
    row = kv_row_size(sizes.head, dtype)
    shape = (2, sequences * blocks, sizes.kv_heads, sizes.block, row)
    cache = open_kv_cache(torch.zeros(shape, dtype=dtype, device=device))
    for part in (cache.keys, cache.values):
        part.copy_(torch.randn(part.shape, dtype=_BF16, device=device))
    if cache.scales is not None:
        cache.scales.keys.fill_(1.0)
        cache.scales.values.fill_(1.0)
    table = torch.randperm(sequences * blocks, device=device).view(sequences, blocks)
    return PagedKVCache(cache, table, torch.full((sequences,), length, device=device))


def kv_bytes(sizes: Sizes, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of one layer's keys and values."""
    return 2 * tokens * sizes.kv_heads * kv_row_size(sizes.head, dtype) * dtype.itemsize


def decode(
    sizes: Sizes, sequences: int, length: int, dtype: torch.dtype, name: str, goal: str = "",
    op: Op = paged_decode_attention,
) -> Case:  # fmt: skip
    """Decode: one new token per sequence."""

    def make(device: torch.device) -> Launch:
        kv = paged_kv_cache(sizes, device, sequences, length, dtype)
        q = torch.randn(sequences, sizes.q_heads, sizes.head, dtype=_BF16, device=device)
        out = torch.empty_like(q)
        return lambda: op(q, kv, sizes.head**-0.5, out=out)

    moved = kv_bytes(sizes, sequences * length, dtype)
    return Case(f"decode attention, {name} cache, {sequences} x {length}", make, moved, goal=goal)


def verify(sizes: Sizes, sequences: int, length: int) -> Case:
    """Verification: a few draft tokens per sequence."""

    def make(device: torch.device) -> Launch:
        kv = paged_kv_cache(sizes, device, sequences, length, _BF16)
        q = torch.randn(sequences, _DRAFTED, sizes.q_heads, sizes.head, dtype=_BF16, device=device)
        return lambda: paged_verify_attention(q, kv, sizes.head**-0.5)

    moved = kv_bytes(sizes, sequences * length, _BF16)
    return Case(f"verify attention, {_DRAFTED} tokens, bf16 cache, {sequences} x {length}", make, moved)


def prefill(
    sizes: Sizes, sequences: int, new: int, cached: int, *, by_torch: bool = False,
    dtype: torch.dtype = _BF16, name: str = "bf16", goal: str = "", op: Op = paged_prefill_attention,
) -> Case:  # fmt: skip
    """Chunks after a cached prefix; ``by_torch``: gathered blocks and torch's causal attention."""
    length = new + cached

    def make(device: torch.device) -> Launch:
        kv = paged_kv_cache(sizes, device, sequences, length, dtype)
        q = torch.randn(sequences * new, sizes.q_heads, sizes.head, dtype=_BF16, device=device)
        bounds = torch.arange(sequences + 1, device=device) * new
        out = torch.empty_like(q)
        more = {"chunks": ((new, length),) * sequences} if by_torch else {}
        return lambda: op(q, kv, bounds, sizes.head**-0.5, out=out, **more)

    seen = sequences * (new * cached + new * (new + 1) // 2)
    way = "gathered, torch's" if by_torch else "the kernel"
    what = f"{sequences} x {new}" + (f" after {cached}" if cached else "")
    return Case(
        f"prefill attention, {name} cache, {what}: {way}",
        make,
        kv_bytes(sizes, sequences * length, dtype),
        4 * sizes.q_heads * sizes.head * seen,
        goal=goal,
    )


def plain(sizes: Sizes, length: int) -> Case:
    """Naive attention with the whole score matrix in memory, as a baseline."""

    def make(device: torch.device) -> Launch:
        q, k, v = (
            torch.randn(heads, length, sizes.head, dtype=_BF16, device=device)
            for heads in (sizes.q_heads, sizes.kv_heads, sizes.kv_heads)
        )
        hidden = torch.ones(length, length, dtype=torch.bool, device=device).triu_(1)
        group = sizes.q_heads // sizes.kv_heads
        return lambda: _plain(q, k.repeat_interleave(group, 0), v.repeat_interleave(group, 0), hidden)

    seen = length * (length + 1) // 2
    return Case(
        f"plain attention, 1 x {length}", make, 0, 4 * sizes.q_heads * sizes.head * seen, sets=1, graph=False
    )


def _plain(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    scores = (q @ k.transpose(1, 2)).mul_(q.shape[-1] ** -0.5).masked_fill_(hidden, float("-inf"))
    return functional.softmax(scores, dim=-1) @ v


def cases(sizes: Sizes) -> list[Case]:
    """All attention cases; the goals for bf16 depend on the size of the cache."""
    found = []
    for sequences, length in sizes.decodes:
        moved = kv_bytes(sizes, sequences * length, _BF16)
        goal = ">= 80 % of 4.8 TB/s" if moved >= 500e6 else ">= 65 % of 4.8 TB/s" if moved >= 130e6 else ""
        found.append(decode(sizes, sequences, length, _BF16, "bf16", goal))
    sequences, length = sizes.decodes[0]
    found += [
        decode(sizes, sequences, length, _FP8, "fp8"),
        decode(sizes, sequences, length, torch.int8, "int8"),
        verify(sizes, sequences, length),
    ]
    for sequences, length in sizes.prompts:
        found += [
            prefill(sizes, sequences, length, 0, goal=">= 300 TFLOP/s"),
            prefill(sizes, sequences, length, 0, by_torch=True),
        ]
    new, cached = sizes.prefix
    longest = max(length for _, length in sizes.prompts)
    return [
        *found,
        prefill(sizes, 1, new, cached),
        prefill(sizes, 1, new, cached, dtype=_FP8, name="fp8"),
        plain(sizes, longest),
    ]
