"""Small paged KV caches whose unused slots hold random numbers."""

import torch

from quire_kernels import KVCache, PagedKVCache

HEADS, KV_HEADS, SIZE, BLOCK = 6, 2, 16, 4
VARIANTS = ({"window": 1}, {"window": 6}, {"window": 100}, {"softcap": 0.5}, {"window": 5, "softcap": 0.5})


def paged_kv_cache(lengths: list[int], dtype: torch.dtype = torch.float32) -> PagedKVCache:
    """Sequences of these lengths; blocks in random order, block tables padded with own blocks."""
    counts = [-(-length // BLOCK) for length in lengths]
    blocks = torch.randperm(sum(counts) + 3).tolist()
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int64)
    for row, count in enumerate(counts):
        own = [blocks.pop() for _ in range(count)]
        table[row] = own[0]
        table[row, :count] = torch.tensor(own)
    shape = (sum(counts) + 3, KV_HEADS, BLOCK, SIZE)
    cache = KVCache(*(torch.randn(shape).to(dtype) for _ in range(2)))
    return PagedKVCache(cache, table, torch.tensor(lengths))
