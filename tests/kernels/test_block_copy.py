"""Block copies move all layers of a block, and nothing else."""

import pytest
import torch

from quire_kernels import host_pool, load_blocks, save_blocks

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)


def layers(dtype: torch.dtype) -> list[torch.Tensor]:
    return [(torch.randn(2, 6, 2, 4, 8) * 50).to(dtype) for _ in range(3)]


@DTYPES
def test_saved_blocks_are_restored_to_other_blocks(dtype: torch.dtype) -> None:
    caches = layers(dtype)
    before = [cache.clone() for cache in caches]
    pool = host_pool(caches, 4)
    save_blocks(caches, pool, [(2, 3), (5, 0)])
    assert torch.equal(pool[3], torch.stack([cache[:, 2] for cache in caches])) and not pool[1:3].any()
    load_blocks(pool, caches, [(0, 1), (3, 4)])
    for cache, its in zip(caches, before, strict=True):
        assert torch.equal(cache, its[:, [0, 5, 2, 3, 2, 5]])


def test_no_pairs_are_no_copies() -> None:
    caches = layers(torch.float32)
    pool = host_pool(caches, 1)
    save_blocks(caches, pool, [])
    load_blocks(pool, caches, [])
    assert not pool.any()


@DTYPES
def test_a_pool_may_be_in_memory_that_others_read_and_write(dtype: torch.dtype) -> None:
    caches = layers(dtype)
    memory = torch.zeros(2 * 3 * 2 * 2 * 4 * 8 * dtype.itemsize + 100, dtype=torch.uint8)
    pool = host_pool(caches, 2, memory)
    save_blocks(caches, pool, [(2, 1)])
    half = (len(memory) - 100) // 2
    assert memory[half : 2 * half].view(dtype).equal(torch.stack([cache[:, 2] for cache in caches]).view(-1))
    assert not memory[:half].any() and not memory[2 * half :].any()
