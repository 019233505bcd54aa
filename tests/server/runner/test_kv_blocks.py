"""The bytes of KV blocks: pieces copied from one cache to another give the same keys and values there."""

import os
from types import SimpleNamespace

import pytest
import torch

from quire_server.layers.attention import kv_row_size
from quire_server.runner import kv_cache
from quire_server.runner.kv_blocks import HostKVBlocks

NUM_BLOCKS, HEADS, SIZE, HEAD = 5, 3, 4, 8


def caches(dtype, seed):
    shape = (2, NUM_BLOCKS, HEADS, SIZE, kv_row_size(HEAD, dtype))
    generator = torch.Generator().manual_seed(seed)
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return tuple(
        torch.randint(0, 120, (num_bytes,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)
        for _ in range(3)
    )


def contents(kv_caches, block_id):
    return [cache[:, block_id].contiguous().view(torch.uint8) for cache in kv_caches]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_a_block_is_copied_whole_and_no_other_one_changes(dtype):
    source, target = caches(dtype, 1), caches(dtype, 2)
    before = [contents(target, block_id) for block_id in range(NUM_BLOCKS)]
    pairs = zip(HostKVBlocks(source).pieces(1), HostKVBlocks(target).pieces(3), strict=True)
    for taken, given in pairs:
        given[:] = taken
    for block_id in range(NUM_BLOCKS):
        wanted = contents(source, 1) if block_id == 3 else before[block_id]
        assert all(map(torch.equal, contents(target, block_id), wanted))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_blocks_in_a_file_are_where_another_process_looks_for_them(dtype):
    config = SimpleNamespace(num_layers=3, num_kv_heads=HEADS, head_size=HEAD)
    file = os.memfd_create("test")
    made = kv_cache.allocate(
        config, NUM_BLOCKS, SIZE, dtype=dtype, device=torch.device("cpu"), descriptor=file
    )
    plain = kv_cache.allocate(config, NUM_BLOCKS, SIZE, dtype=dtype, device=torch.device("cpu"))
    assert [(one.shape, one.dtype, one.is_contiguous()) for one in made] == [
        (one.shape, one.dtype, one.is_contiguous()) for one in plain
    ]
    assert not any(one.view(torch.uint8).any() for one in made)
    blocks = HostKVBlocks(made, file)
    for cache, filled in zip(made, caches(dtype, 1), strict=True):
        cache.copy_(filled)
    for block_id in range(NUM_BLOCKS):
        size = blocks.pieces(0)[0].nbytes
        found = [os.pread(file, size, block_id * size + part * blocks.stride) for part in range(2 * 3)]
        assert found == [bytes(piece) for piece in blocks.pieces(block_id)]
    os.close(file)


def test_the_size_of_a_block_is_the_sum_of_its_pieces():
    blocks = HostKVBlocks(caches(torch.float32, 1))
    assert (
        blocks.block_bytes
        == sum(piece.nbytes for piece in blocks.pieces(0))
        == 3 * 2 * HEADS * SIZE * HEAD * 4
    )


def test_cleared_blocks_are_zero_and_no_others():
    kv_caches = caches(torch.float32, 1)
    before = contents(kv_caches, 0)
    HostKVBlocks(kv_caches).clear([2, 4])
    assert not any(part.any() for block_id in (2, 4) for part in contents(kv_caches, block_id))
    assert all(map(torch.equal, contents(kv_caches, 0), before))
