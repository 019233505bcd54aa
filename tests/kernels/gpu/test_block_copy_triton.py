"""Block copies of all layers in one launch equal copies of one block at a time."""

from typing import Any

import pytest
import torch

from quire_kernels.block_copy import block_copy_reference
from quire_kernels.block_copy_triton import block_copy_triton
from quire_kernels.paged_kv_cache import kv_row_size
from tests.kernels.gpu.pairwise import cases

FACTORS: dict[str, Any] = {
    "pairs": [[(3, 0), (1, 4), (3, 2)], [(0, 4)]],
    "dtype": [torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn],
    "block": [16, 64],
    "kv_heads": [3, 1],
    "size": [64, 80, 96, 128, 256],
    "layers": [3, 1],
    "is_apart": [False, True],
}


@pytest.mark.parametrize("case", cases(FACTORS), ids=str)
def test_it_is_bitwise_equal_to_its_reference(case: dict[str, Any], device: str) -> None:
    dtype, row = case["dtype"], kv_row_size(case["size"], case["dtype"]) * case["dtype"].itemsize
    shape = (2, 5, case["kv_heads"] + case["is_apart"], case["block"], row)
    # Random bytes, NaN included.
    layers = [torch.randint(256, shape, device=device).to(torch.uint8) for _ in range(case["layers"])]
    expected = [layer.clone() for layer in layers]
    for given, copy in ((layers, block_copy_triton), (expected, block_copy_reference)):
        parts = [half[:, : case["kv_heads"]].view(dtype) for layer in given for half in layer.unbind(0)]
        copy(parts, parts, case["pairs"])
    assert all(torch.equal(layer, its) for layer, its in zip(layers, expected, strict=True))


def test_blocks_longer_than_one_program_are_copied_to_a_buffer_and_back(device: str) -> None:
    layers = [torch.randn(2, 5, 2, 64, 128, device=device) for _ in range(2)]
    parts = [half for layer in layers for half in layer.unbind(0)]
    staging = torch.zeros(3, 4, 2, 64, 128, device=device)
    block_copy_triton(parts, staging.unbind(1), [(4, 0), (1, 2)])
    assert torch.equal(staging[2, 3], layers[1][1, 1]) and (staging[1] == 0).all()
    block_copy_triton(staging.unbind(1), parts, [(0, 3)])
    assert all(torch.equal(layer[:, 3], layer[:, 4]) for layer in layers)


def test_tensors_without_16_byte_alignment_are_refused(device: str) -> None:
    odd = [torch.zeros(4, 3, 5, device=device)]
    with pytest.raises(ValueError, match="blocks of 60 bytes"):
        block_copy_triton(odd, odd, [(0, 1)])
    apart = [torch.zeros(4, 8, 8, device=device).transpose(1, 2)]
    with pytest.raises(ValueError, match="in one piece"):
        block_copy_triton(apart, apart, [(0, 1)])
    with pytest.raises(ValueError, match="same shape"):
        block_copy_triton([torch.zeros(4, 8, device=device)], [torch.zeros(4, 16, device=device)], [(0, 1)])
