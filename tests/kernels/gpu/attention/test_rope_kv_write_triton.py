"""The fused kernel equals norm, rotation, quantization and cache write in sequence."""

from typing import Any

import pytest
import torch
from torch import Tensor

from quire_kernels.attention.rope_kv_write import rope_kv_write_reference
from quire_kernels.attention.rope_kv_write_triton import rope_kv_write_triton
from quire_kernels.norm.qk_norm import qk_norm_reference
from quire_kernels.paged_kv_cache import KVCache, kv_row_size, open_kv_cache
from tests.kernels.gpu.attention.paged_caches import CACHES, DTYPES
from tests.kernels.gpu.pairwise import cases
from tests.kernels.gpu.tolerances import assert_near

FACTORS: dict[str, Any] = {
    "tokens": [5, 123, 257, 1, 0],
    "group": [4, 3, 1, 8],
    "kv_heads": [1, 2],
    "size": [(64, 64), (80, 32), (96, 96), (128, 64), (256, 256)],  # and how many dimensions are rotated
    "block": [16, 64],
    "dtype": DTYPES,
    "cache": CACHES,
    "fixed": [None, 0.01],  # fixed scale of keys, twice it for values: some elements saturate
    "norm": [None, "as the model", torch.float32],
    "by_position": [True, False],
    "is_padded": [False, True],
}
BLOCKS = 20


def new_cache(
    kv_heads: int,
    block_size: int,
    head_size: int,
    dtype: torch.dtype,
    device: str,
    fixed: float | None = None,
) -> KVCache:
    """A cache full of NaN (of 127 for int8), a slice of a wider one, so that its blocks are not adjacent."""
    shape = (2, BLOCKS, kv_heads + 1, block_size, kv_row_size(head_size, dtype))
    whole = torch.full(shape, 127 if dtype == torch.int8 else float("nan"), device=device).to(dtype)
    scale = None if fixed is None else torch.tensor(fixed, device=device)
    return open_kv_cache(whole[:, :, :kv_heads], None if scale is None else (scale, scale * 2))


def parts_of(cache: KVCache) -> list[Tensor]:
    """Keys, values and their scales."""
    data = [cache.keys, cache.values]
    return data if cache.scales is None else [*data, cache.scales.keys, cache.scales.values]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("case", cases(FACTORS), ids=str)
def test_it_equals_norm_rotation_and_write_in_sequence_and_touches_no_other_slot(
    case: dict[str, Any], device: str
) -> None:
    tokens, group, kv_heads, block = (case[name] for name in ("tokens", "group", "kv_heads", "block"))
    (size, turned), dtype, heads = case["size"], case["dtype"], group * kv_heads
    cache, norm = case["cache"] or dtype, dtype if isinstance(case["norm"], str) else case["norm"]
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * size + 8, device=device).to(dtype)[:, :-8]
    angles = torch.rand(300, turned // 2, device=device) * 6
    cos, sin = angles.cos(), angles.sin()
    positions = torch.randint(300, (tokens,), device=device)
    slots = torch.randperm(BLOCKS * block, device=device)[:tokens]
    weights = [torch.randn(size, device=device).to(norm) for _ in range(2)] if norm else None
    ours, theirs, before = (new_cache(kv_heads, block, size, cache, device, case["fixed"]) for _ in range(3))
    normed = qkv.contiguous().clone()
    if weights:
        qk_norm_reference(normed, *weights, 1e-6, kv_heads)
    their_cos, their_sin = cos[positions], sin[positions]
    expected = rope_kv_write_reference(normed, their_cos, their_sin, slots, theirs)
    stored = torch.arange(tokens, device=device) % 3 != 1 if case["is_padded"] else slots >= 0
    given = rope_kv_write_triton(
        qkv,
        *((cos, sin, positions) if case["by_position"] else (their_cos, their_sin, None)),
        torch.where(stored, slots, -1),
        ours,
        norms=(*weights, 1e-6) if weights else None,
    )
    assert_near(given, expected)
    where = (slots[stored] // block, slice(None), slots[stored] % block)
    keys, values, *scales = (
        (our[where], their[where]) for our, their in zip(parts_of(ours), parts_of(theirs), strict=True)
    )
    assert torch.equal(values[0].float(), values[1].float())
    if scales:
        assert_near(*scales[0], largest=1e-2)
        assert torch.equal(*scales[1])
        # Keys may round to the next step; values are equal.
        bound = 1 if cache == torch.int8 else 32
        assert ((keys[0].float() - keys[1].float()).abs() <= bound).all()
    else:
        assert_near(*keys)
    for part, untouched in zip(parts_of(ours), parts_of(before), strict=True):
        untouched[where] = part[where]
        assert torch.equal(part.contiguous().view(torch.uint8), untouched.contiguous().view(torch.uint8))


def test_fixed_scales_saturate_and_non_finite_values_read_back_as_nan(device: str) -> None:
    cache = new_cache(1, 16, 16, torch.float8_e4m3fn, device, fixed=0.01)
    assert cache.scales is not None
    qkv = torch.full((3, 3 * 16), 100.0, device=device)
    qkv[1, -1], qkv[2, 20] = float("nan"), float("inf")
    angles = torch.zeros(3, 8, device=device)
    rope_kv_write_triton(qkv, angles.cos(), angles.sin(), None, torch.arange(3, device=device), cache)
    keys = cache.keys[0, 0, :3].float() * cache.scales.keys[0, 0, :3, None]
    values = cache.values[0, 0, :3].float() * cache.scales.values[0, 0, :3, None]
    torch.testing.assert_close(keys[0], torch.full((16,), 4.48, device=device))
    torch.testing.assert_close(values[0], torch.full((16,), 8.96, device=device))
    assert keys[1].isfinite().all() and values[1].isnan().all()
    assert keys[2].isnan().all() and values[2].isfinite().all()


def test_shapes_that_do_not_fit_are_refused(device: str) -> None:
    cache = new_cache(2, 16, 32, torch.float32, device)
    angles, slots = torch.rand(1, 16, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="no fit: qkv of 128"):
        rope_kv_write_triton(torch.randn(1, 128, device=device), angles, angles, None, slots, cache)
    odd = cache.keys.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="in one piece"):
        qkv = torch.randn(1, 256, device=device)
        rope_kv_write_triton(qkv, angles, angles, None, slots, KVCache(odd, odd))
