"""Block copies of all layers in one launch equal copies of one block at a time."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from quire_kernels.block_copy import BlockBuffer, block_copy_reference
from quire_kernels.block_copy_triton import block_copy_triton
from quire_kernels.paged_kv_cache import kv_row_size
from tests.kernels.gpu.as_cuda import as_cuda
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


def copied(sources: Sequence[Tensor], targets: Sequence[Tensor], pairs: list[tuple[int, int]]) -> None:
    device = sources[0].device
    tables = [
        torch.tensor([part.data_ptr() for part in given], device=device) for given in (sources, targets)
    ]
    block_copy_triton(sources, targets, torch.tensor(pairs, device=device), (tables[0], tables[1]))


@pytest.mark.parametrize("case", cases(FACTORS), ids=str)
def test_it_is_bitwise_equal_to_its_reference(case: dict[str, Any], device: str) -> None:
    dtype, row = case["dtype"], kv_row_size(case["size"], case["dtype"]) * case["dtype"].itemsize
    shape = (2, 5, case["kv_heads"] + case["is_apart"], case["block"], row)
    # Random bytes, NaN included.
    layers = [torch.randint(256, shape, device=device).to(torch.uint8) for _ in range(case["layers"])]
    expected = [layer.clone() for layer in layers]
    for given, copy in ((layers, copied), (expected, block_copy_reference)):
        parts = [half[:, : case["kv_heads"]].view(dtype) for layer in given for half in layer.unbind(0)]
        copy(parts, parts, case["pairs"])
    assert all(torch.equal(layer, its) for layer, its in zip(layers, expected, strict=True))


def test_blocks_longer_than_one_program_are_copied_to_a_buffer_and_back(device: str) -> None:
    layers = [torch.randn(2, 5, 2, 64, 128, device=device) for _ in range(2)]
    before = [layer.clone() for layer in layers]
    with as_cuda() as launched:
        buffer = BlockBuffer(layers, 3)
        buffer.gather(torch.tensor([(4, 0), (1, 2)], device=device))
        assert torch.equal(buffer.data[2], torch.stack([layer[:, 1] for layer in layers]))
        buffer.scatter(torch.tensor([(0, 3)], device=device))
    assert launched == ["block_copy_triton"] * 2
    for layer, its in zip(layers, before, strict=True):
        assert torch.equal(layer, its[:, [0, 1, 2, 4, 4]])


def test_tensors_without_16_byte_alignment_are_refused(device: str) -> None:
    odd = [torch.zeros(4, 3, 5, device=device)]
    with pytest.raises(ValueError, match="blocks of 60 bytes"):
        copied(odd, odd, [(0, 1)])
    apart = [torch.zeros(4, 8, 8, device=device).transpose(1, 2)]
    with pytest.raises(ValueError, match="in one piece"):
        copied(apart, apart, [(0, 1)])
    with pytest.raises(ValueError, match="same shape"):
        copied([torch.zeros(4, 8, device=device)], [torch.zeros(4, 16, device=device)], [(0, 1)])
