import pytest
import torch

from quire_kernels import KVCache
from quire_kernels.attention.rope_kv_write import kv_cache_rows, rope_kv_write, rope_kv_write_reference
from quire_kernels.norm.qk_norm import qk_norm_reference

HEADS, KV_HEADS, SIZE, BLOCK = 6, 2, 8, 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prepared", [True, False])
def test_q_and_both_caches_equal_the_reference_and_no_other_slot_is_touched(
    dtype: torch.dtype, prepared: bool
) -> None:
    qkv = torch.randn(5, (HEADS + 2 * KV_HEADS) * SIZE, dtype=dtype)
    angles = torch.rand(50, SIZE // 2)
    positions, slots = torch.tensor([3, 4, 49, 0, 1]), torch.tensor([7, 8, 39, 0, 1])
    ours, theirs = (torch.full((2, 10, KV_HEADS, BLOCK, SIZE), 9.0, dtype=dtype) for _ in range(2))
    our, their = KVCache(*ours), KVCache(*theirs)
    expected = rope_kv_write_reference(qkv, angles.cos()[positions], angles.sin()[positions], slots, their)
    if prepared:
        rows = kv_cache_rows(slots, KV_HEADS, BLOCK)
        cos, sin = angles.cos()[positions], angles.sin()[positions]
        q = rope_kv_write(qkv, cos, sin, None, slots, our, cache_rows=lambda: rows)
    else:
        q = rope_kv_write(qkv, angles.cos(), angles.sin(), positions, slots, our)
    torch.testing.assert_close(q, expected)
    torch.testing.assert_close(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])
    assert int((ours[0] != 9.0).any(dim=-1).sum()) == len(slots) * KV_HEADS


def test_dimensions_beyond_the_rotary_ones_stay_as_they_are() -> None:
    qkv = torch.randn(3, (HEADS + 2 * KV_HEADS) * SIZE)
    angles, slots = torch.rand(3, SIZE // 4), torch.tensor([7, 8, 39])
    ours, theirs = torch.zeros(2, 2, 10, KV_HEADS, BLOCK, SIZE)
    our, their = KVCache(*ours), KVCache(*theirs)
    q = rope_kv_write(qkv, angles.cos(), angles.sin(), None, slots, our)
    torch.testing.assert_close(q, rope_kv_write_reference(qkv, angles.cos(), angles.sin(), slots, their))
    torch.testing.assert_close(ours, theirs)
    given = qkv.view(3, -1, SIZE)[:, :HEADS]
    assert torch.equal(q[..., SIZE // 2 :], given[..., SIZE // 2 :])
    assert not torch.equal(q[..., : SIZE // 2], given[..., : SIZE // 2])


def test_norms_come_before_the_rotation() -> None:
    qkv, weights = torch.randn(3, (HEADS + 2 * KV_HEADS) * SIZE), torch.randn(2, SIZE)
    angles, slots = torch.rand(3, SIZE // 2), torch.tensor([7, 8, 39])
    ours, theirs = torch.zeros(2, 2, 10, KV_HEADS, BLOCK, SIZE)
    our, their = KVCache(*ours), KVCache(*theirs)
    normed = qkv.clone()
    qk_norm_reference(normed, weights[0], weights[1], 1e-5, KV_HEADS)
    expected = rope_kv_write_reference(normed, angles.cos(), angles.sin(), slots, their)
    norms = (weights[0], weights[1], 1e-5)
    q = rope_kv_write(qkv, angles.cos(), angles.sin(), None, slots, our, norms=norms)
    torch.testing.assert_close(q, expected)
    torch.testing.assert_close(ours, theirs)
