"""A paged cache with garbage wherever no token of the sequence lies."""

import torch
from torch import Tensor

HEADS, KV_HEADS, SIZE, BLOCK = 6, 2, 16, 4
VARIANTS = ({"window": 1}, {"window": 6}, {"window": 100}, {"softcap": 0.5}, {"window": 5, "softcap": 0.5})


def cache(lengths: list[int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(k_cache, v_cache, block_table, seq_lens); blocks in random order, tables padded with own blocks."""
    counts = [-(-length // BLOCK) for length in lengths]
    blocks = torch.randperm(sum(counts) + 3).tolist()
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int64)
    for row, count in enumerate(counts):
        own = [blocks.pop() for _ in range(count)]
        table[row] = own[0]
        table[row, :count] = torch.tensor(own)
    shape = (sum(counts) + 3, KV_HEADS, BLOCK, SIZE)
    k_cache, v_cache = (torch.randn(shape).to(dtype) for _ in range(2))
    return k_cache, v_cache, table, torch.tensor(lengths)
