"""Repacked weights equal the definitions of the checkpoint formats."""

import pytest
import torch
from torch import Tensor

from quire_kernels.quantization.w4a16 import w4a16
from quire_kernels.quantization.w4a16_packing import repack_awq, repack_gptq, repack_packed, w4_dequantize
from quire_server.layers.quantized.awq import AWQ
from quire_server.layers.quantized.gptq import GPTQ
from quire_server.layers.quantized.pack_quantized import Packed


def words(*shape: int) -> Tensor:
    return torch.randint(-(1 << 31), 1 << 31, shape).to(torch.int32)


def scales(*shape: int) -> Tensor:
    return (torch.rand(*shape) * 0.02 + 1e-3).half().float()


@pytest.mark.parametrize("size", [32, 64, 128, None])
def test_awq(size: int | None) -> None:
    inputs, outputs = 384, 40
    groups = inputs // (size or inputs)
    tensors = {
        "qweight": words(inputs, outputs // 8),
        "qzeros": words(groups, outputs // 8),
        "scales": scales(groups, outputs),
    }
    expected = AWQ(size).dequantize("layer", tensors).T
    assert torch.equal(w4_dequantize(repack_awq(**tensors)), expected)


@pytest.mark.parametrize("zero_offset", [0, 1])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("size", [64, 128, None])
def test_gptq(size: int | None, ordered: bool, zero_offset: int) -> None:
    inputs, outputs = 384, 40
    groups = inputs // (size or inputs)
    g_idx = torch.arange(inputs, dtype=torch.int32) // (size or inputs)
    tensors = {
        "qweight": words(inputs // 8, outputs),
        "qzeros": words(groups, outputs // 8),
        "scales": scales(groups, outputs),
        "g_idx": g_idx[torch.randperm(inputs)] if ordered else g_idx,
    }
    expected = GPTQ(size, ordered, zero_offset).dequantize("layer", tensors).T
    weight = repack_gptq(**tensors, zero_offset=zero_offset)
    assert torch.equal(w4_dequantize(weight), expected)
    assert (weight.order is None) == (groups == 1 or not ordered)
    x = torch.randn(3, inputs).bfloat16()
    torch.testing.assert_close(w4a16(x, weight), (x.float() @ expected).bfloat16())


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("size", [64, 128, None])
def test_pack_quantized(size: int | None, has_zeros: bool) -> None:
    inputs, outputs = 384, 43
    groups = inputs // (size or inputs)
    tensors = {
        "weight_packed": words(outputs, inputs // 8),
        "weight_scale": scales(outputs, groups),
        "weight_shape": torch.tensor([outputs, inputs]),
    }
    zeros = words(-(-outputs // 8), groups) if has_zeros else None
    if zeros is not None:
        tensors["weight_zero_point"] = zeros
    expected = Packed(4, size, has_zeros).dequantize("layer", tensors).T
    given = repack_packed(tensors["weight_packed"], tensors["weight_scale"], zeros)
    assert torch.equal(w4_dequantize(given), expected)


def test_groups_of_different_sizes_are_refused() -> None:
    g_idx = torch.zeros(128, dtype=torch.int32)
    g_idx[0] = 1
    with pytest.raises(ValueError, match="each of 2 groups 64 times"):
        repack_gptq(words(16, 8), words(2, 1), scales(2, 8), g_idx, 1)
