"""The ops on shapes that the CPU kernels support, compared with the references."""

import itertools
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from quire_kernels import KVCache, PagedKVCache, open_kv_cache
from quire_kernels.activation.silu_mul import silu_mul, silu_mul_reference
from quire_kernels.attention.paged_decode_attention import (
    paged_decode_attention,
    paged_decode_attention_reference,
)
from quire_kernels.attention.rope_kv_write import rope_kv_write, rope_kv_write_reference
from quire_kernels.cpu.library import LIBRARY as LOADED
from quire_kernels.cpu.native import ISA_VARIABLE, ISAS, NATIVE, Isa, Native, choices, choose
from quire_kernels.cpu.native_build import LIBRARY
from quire_kernels.norm.add_rmsnorm import add_rmsnorm, add_rmsnorm_reference
from quire_kernels.quantization.int8_linear import pack_int8
from quire_kernels.take_rows import take_partial_rows, take_partial_rows_reference

pytestmark = pytest.mark.usefixtures("each_isa")

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: {"atol": 2e-6, "rtol": 2e-6}, torch.bfloat16: {"atol": 2e-2, "rtol": 1e-2}}


def paged_kv_cache(lengths: list[int], head_size: int, dtype: torch.dtype, block: int) -> PagedKVCache:
    counts = [-(-length // block) for length in lengths]
    blocks = iter(torch.randperm(sum(counts) + 2).tolist())
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int64)
    for row, count in enumerate(counts):
        table[row, :count] = torch.tensor(list(itertools.islice(blocks, count)))
    caches = torch.randn(2, sum(counts) + 2, 2, block, head_size).to(dtype)
    return PagedKVCache(KVCache(caches[0], caches[1]), table, torch.tensor(lengths))


def test_the_library_is_used_where_it_was_built() -> None:
    assert (NATIVE is not None) <= LIBRARY.exists()


@pytest.mark.parametrize(
    ("runnable", "wanted", "chosen"),
    [
        (ISAS, None, "avx512_vnni"),
        (ISAS, "avx2", "avx2"),
        (("avx2",), None, "avx2"),
        ((), None, None),
        (ISAS, "none", None),
        ((), "none", None),
    ],
)
def test_the_fastest_kernels_of_the_cpu_are_chosen_unless_the_environment_names_others(
    runnable: tuple[Isa, ...], wanted: str | None, chosen: Isa | None
) -> None:
    assert choose(runnable, wanted) == chosen


def test_kernels_that_the_cpu_cannot_run_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"QUIRE_CPU_ISA is 'avx512_vnni', .* runs: avx2, none\. Set one"):
        choose(("avx2",), "avx512_vnni")


@pytest.mark.parametrize("wanted", [*choices(LOADED), "none"])
def test_the_environment_switches_the_kernels_of_a_process(wanted: str) -> None:
    program = "from quire_kernels import NATIVE; print('none' if NATIVE is None else NATIVE.isa)"
    environ = {**os.environ, ISA_VARIABLE: wanted}
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == wanted


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_instruction_sets_compute_the_same_bits(dtype: torch.dtype) -> None:
    """So replicas on different CPUs differ by their dtype at most."""
    natives = [Native(LOADED, isa) for isa in choices(LOADED)] if LOADED is not None else []
    kv = paged_kv_cache([1, 40, 100], 64, dtype, 16)
    q, x, weight = torch.randn(3, 6, 64).to(dtype), torch.randn(13, 576).to(dtype), torch.randn(576).to(dtype)
    packed = pack_int8(torch.randint(-128, 128, (96, 576)).to(torch.int8), torch.rand(96))
    for one, other in itertools.pairwise(natives):
        attended, of_other = (each.decode_attention(q, kv, 0.125, None) for each in (one, other))
        assert torch.equal(attended, of_other)
        assert torch.equal(one.silu_mul(x * 30), other.silu_mul(x * 30))
        assert torch.equal(one.add_rmsnorm(x, None, weight, 1e-5), other.add_rmsnorm(x, None, weight, 1e-5))
        of_one, of_other = (each.int8_linear(x, packed.packed, packed.scales, None) for each in (one, other))
        assert torch.equal(of_one, of_other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_residual", [False, True])
def test_norm(dtype: torch.dtype, with_residual: bool) -> None:
    x, weight = torch.randn(9, 576).to(dtype), torch.randn(576).to(dtype)
    residual = torch.randn(9, 576).to(dtype) if with_residual else None
    expected_residual = None if residual is None else residual.clone()
    result = add_rmsnorm(x.clone(), residual, weight, 1e-5)
    expected = add_rmsnorm_reference(x, expected_residual, weight, 1e-5)
    torch.testing.assert_close(result, expected, **TOLERANCE[dtype])
    if residual is not None:
        assert torch.equal(residual, expected_residual)  # one addition, one rounding


@pytest.mark.parametrize("dtype", DTYPES)
def test_activation_at_any_magnitude(dtype: torch.dtype) -> None:
    gate_up = (torch.randn(7, 96) * torch.tensor([0.01, 1, 10, 50, 100, 300, 1e4])[:, None]).to(dtype)
    torch.testing.assert_close(silu_mul(gate_up), silu_mul_reference(gate_up), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [32, 64, 128])
def test_rotation_and_the_write_to_the_cache(dtype: torch.dtype, head_size: int) -> None:
    qkv = torch.randn(5, (6 + 2 * 2) * head_size).to(dtype)
    angles = torch.rand(5, head_size // 2) * 6
    slots = torch.tensor([3, 17, 31, 8, 12])
    ours, theirs = (open_kv_cache(torch.zeros(2, 4, 2, 8, head_size, dtype=dtype)) for _ in range(2))
    q = rope_kv_write(qkv, angles.cos(), angles.sin(), None, slots, ours)
    expected = rope_kv_write_reference(qkv, angles.cos(), angles.sin(), slots, theirs)
    for mine, reference in ((q, expected), (ours.keys, theirs.keys), (ours.values, theirs.values)):
        torch.testing.assert_close(mine, reference, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [64, 96, 128])
@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("lengths", [[1], [37], [16, 1, 40, 33, 5], [300] * 3])
def test_decode_attention(dtype: torch.dtype, head_size: int, window: int | None, lengths: list[int]) -> None:
    kv = paged_kv_cache(lengths, head_size, dtype, 16)
    q = torch.randn(len(lengths), 6, head_size).to(dtype)
    result = paged_decode_attention(q, kv, 0.125, window=window)
    expected = paged_decode_attention_reference(q, kv, 0.125, window=window)
    torch.testing.assert_close(result, expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_a_sequence_does_not_depend_on_other_sequences(dtype: torch.dtype) -> None:
    kv = paged_kv_cache([40, 7, 100, 16, 33], 64, dtype, 16)
    q = torch.randn(5, 6, 64).to(dtype)
    together = paged_decode_attention(q, kv, 0.125)
    for row in range(5):
        part = slice(row, row + 1)
        alone = paged_decode_attention(
            q[part], PagedKVCache(kv.cache, kv.block_table[part], kv.seq_lens[part]), 0.125
        )
        assert torch.equal(alone[0], together[row])


def test_a_failed_allocation_raises_and_the_next_call_is_correct() -> None:
    kv = paged_kv_cache([20], 64, torch.float32, 16)
    q = torch.randn(1, 6, 64)
    expected = paged_decode_attention(q, kv, 0.125)
    # Without the library (a CPU without AVX2) torch computes, and refuses in its own words.
    error = RuntimeError if NATIVE is None else MemoryError
    with pytest.raises(error, match="no memory to work in|can't allocate memory"):
        paged_decode_attention(q, replace(kv, seq_lens=torch.tensor([1 << 50])), 0.125)
    assert torch.equal(paged_decode_attention(q, kv, 0.125), expected)


def test_nan_is_propagated() -> None:
    kv = paged_kv_cache([20, 20], 64, torch.float32, 16)
    q = torch.randn(2, 6, 64)
    kv.cache.keys[kv.block_table[0, 1], :, 2] = float("nan")
    result = paged_decode_attention(q, kv, 0.125)
    assert result[0].isnan().all() and result[1].isfinite().all()
    x = torch.full((1, 64), float("nan"))
    assert add_rmsnorm(x, None, torch.ones(64), 1e-5).isnan().all() and silu_mul(x).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_other_ranks_are_zeros(dtype: torch.dtype) -> None:
    table, index = torch.randn(10, 24).to(dtype), torch.tensor([0, 19, 20, 25, 29, 30, 1 << 40])
    rows = take_partial_rows(table, index, 20)
    assert torch.equal(rows, take_partial_rows_reference(table, index, 20))
    assert torch.equal(rows[2:5], table[[0, 5, 9]]) and not rows[[0, 1, 5, 6]].any()
