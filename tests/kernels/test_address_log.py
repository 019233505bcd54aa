"""The log of addresses finds planted faults, and caches beyond 2 ** 31 elements are addressed rightly."""

import mmap
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.attention.paged_decode_attention import paged_decode_attention_reference
from quire_kernels.attention.paged_decode_attention_triton import paged_decode_attention_triton
from quire_kernels.attention.paged_prefill_attention import paged_prefill_attention_reference
from quire_kernels.attention.paged_prefill_attention_triton import paged_prefill_attention_triton
from quire_kernels.attention.rope_kv_write_triton import rope_kv_write_triton
from quire_kernels.paged_kv_cache import KVCache, PagedKVCache

if not torch.cuda.is_available():
    from tests.kernels.gpu.address_log import address_log
    from tests.kernels.gpu.interpreter import interpreted

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the log is of the interpreter")


@triton.jit
def _shifted(x_ptr, y_ptr, n, BEYOND: tl.constexpr, OVERLAP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * (BLOCK - OVERLAP) + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at + BEYOND, mask=at < n, other=0.0)
    tl.store(y_ptr + at, x, mask=at < n)


@triton.jit
def _next_of_each(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at + 1, mask=at + 1 < n, other=0.0), mask=at < n)


@triton.jit
def _counted(x_ptr, total_ptr, n, PLAIN: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(total_ptr, tl.sum(tl.load(x_ptr + at, mask=at < n, other=0.0), 0))
    if PLAIN:
        tl.store(total_ptr, 0.0)


@triton.jit
def _narrow(cache_ptr, out_ptr, block, stride, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(cache_ptr + block * stride + at))


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    torch.manual_seed(0)
    with interpreted():
        yield


def faults(launch: Callable[[], object]) -> set[str]:
    with address_log() as log:
        launch()
    assert log.launches
    return {kind for _, kind in log.faults}


def test_planted_faults_are_found_and_nothing_else() -> None:
    x, y, one = torch.randn(37), torch.zeros(37), torch.zeros(1)
    grid = (4,)
    assert faults(lambda: _shifted[grid](x, y, 37, BEYOND=0, OVERLAP=0, BLOCK=16)) == set()
    assert faults(lambda: _shifted[grid](x, y, 37, BEYOND=1, OVERLAP=0, BLOCK=16)) == {
        "reads outside of the arguments"
    }
    assert faults(lambda: _shifted[grid](x, y, 37, BEYOND=0, OVERLAP=1, BLOCK=16)) == {
        "two programs write one place"
    }
    assert faults(lambda: _next_of_each[grid](x, 37, BLOCK=16)) == {"a program reads what another one writes"}
    assert faults(lambda: _counted[grid](x, one, 37, PLAIN=False, BLOCK=16)) == set()
    assert "a program writes what another one changes by atomics" in faults(
        lambda: _counted[grid](x, one, 37, PLAIN=True, BLOCK=16)
    )


NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux, which Python names from 3.13 on


def sparse(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros of any size, of which only the pages take memory that are written."""
    size = torch.Size(shape).numel() * dtype.itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


BLOCKS, KV_HEADS, BLOCK, HEAD = 70_000, 8, 64, 64  # 2.3 * 10 ** 9 elements of keys
TOP = [BLOCKS - 1, BLOCKS - 2]


def test_an_offset_of_32_bits_is_found() -> None:
    cache, out = sparse((BLOCKS, KV_HEADS * BLOCK * HEAD), torch.int8), torch.zeros(16, dtype=torch.int8)
    stride = cache.stride(0)
    assert faults(lambda: _narrow[(1,)](cache, out, 5, stride, BLOCK=16)) == set()
    assert faults(lambda: _narrow[(1,)](cache, out, BLOCKS - 1, stride, BLOCK=16)) == {
        "reads outside of the arguments"
    }


@pytest.fixture(scope="module")
def kv() -> PagedKVCache:
    """Two sequences at the top of a cache of more than 2 ** 31 elements, whose blocks are filled."""
    keys, values = (sparse((BLOCKS, KV_HEADS, BLOCK, HEAD), torch.bfloat16) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    for each in (keys, values):
        for block in TOP:
            each[block] = torch.randn(each.shape[1:], generator=generator)
    table = torch.tensor([[TOP[0]], [TOP[1]]])
    return PagedKVCache(KVCache(keys, values, None), table, torch.tensor([40, 9]))


def test_decode_reads_the_top_of_a_large_cache(kv: PagedKVCache) -> None:
    q = torch.randn(2, KV_HEADS, HEAD).bfloat16()
    with address_log() as log:
        given = [paged_decode_attention_triton(q, kv, 0.125, splits=splits) for splits in (1, 2)]
    wanted = paged_decode_attention_reference(q, kv, 0.125)
    for each in given:
        torch.testing.assert_close(each, wanted, atol=0.02, rtol=0.02)
    assert not log.faults


def test_prefill_reads_and_rope_writes_the_top_of_a_large_cache(kv: PagedKVCache) -> None:
    q, bounds = torch.randn(5, KV_HEADS, HEAD).bfloat16(), torch.tensor([0, 3, 5])
    wanted = paged_prefill_attention_reference(q, kv, bounds, 0.125)
    qkv = torch.randn(2, 3 * KV_HEADS * HEAD).bfloat16()
    slots = torch.tensor([BLOCKS * BLOCK - 1, 3])
    with address_log() as log:
        given = paged_prefill_attention_triton(q, kv, bounds, 0.125)
        angles = torch.ones(2, HEAD // 2), torch.zeros(2, HEAD // 2)
        rope_kv_write_triton(qkv, *angles, None, slots, replace(kv).cache)
    torch.testing.assert_close(given, wanted, atol=0.02, rtol=0.02)
    heads = qkv.view(2, 3, KV_HEADS, HEAD)
    assert torch.equal(kv.cache.keys[BLOCKS - 1, :, BLOCK - 1], heads[0, 1])
    assert torch.equal(kv.cache.values[0, :, 3], heads[1, 2])
    assert not log.faults
