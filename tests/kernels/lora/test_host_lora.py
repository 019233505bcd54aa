"""The product of LoRA adapters on a CPU, by the kernel and by torch, compared with its definition."""

import pytest
import torch
from torch import Tensor

from quire_kernels import HostLora

pytestmark = pytest.mark.usefixtures("each_isa")

SIZES = [(64,), (96, 32, 32), (80, 16, 16), (48, 48)]
OF = torch.tensor([0, -1, 2, 0, 1, 2, -1])
RANKS = (5, 8, 1)


def filled(
    sizes: tuple[int, ...], in_size: int, dtype: torch.dtype
) -> tuple[HostLora, list[list[tuple[Tensor, Tensor]]]]:
    lora = HostLora(3, 8, in_size, sizes, dtype)
    factors = [
        [(torch.randn(rank, in_size).to(dtype), torch.randn(size, rank).to(dtype)) for size in sizes]
        for rank in RANKS
    ]
    for slot, (rank, pairs) in enumerate(zip(RANKS, factors, strict=True)):
        lora.fill(slot, [(torch.ones(8, in_size), torch.ones(size, 8)) for size in sizes], 8)  # a former one
        lora.fill(slot, pairs, rank)
    return lora, factors


def expected(x: Tensor, y: Tensor, factors: list[list[tuple[Tensor, Tensor]]], of: Tensor = OF) -> Tensor:
    rows = []
    for row, slot in enumerate(of.tolist()):
        added = torch.cat([b.double() @ (a.double() @ x[row].double()) for a, b in factors[slot]])
        rows.append(y[row].double() + (added if slot >= 0 else 0))
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("in_size", [64, 40])  # 40: by torch
def test_each_row_gets_the_update_of_its_adapter(
    sizes: tuple[int, ...], in_size: int, dtype: torch.dtype
) -> None:
    lora, factors = filled(sizes, in_size, dtype)
    x, y = torch.randn(7, in_size).to(dtype), torch.randn(7, sum(sizes)).to(dtype)
    wanted = expected(x, y, factors)
    before = y.clone()
    lora.add(y, x, OF)
    error = (y.double() - wanted).abs() / wanted.abs().clamp(min=1)
    assert error.max() < (1e-5 if dtype == torch.float32 else 1e-2)
    assert torch.equal(y[OF < 0], before[OF < 0])


def test_a_row_does_not_depend_on_the_others_of_its_batch() -> None:
    lora, _ = filled((96, 32, 32), 64, torch.float32)
    x, y = torch.randn(7, 64), torch.randn(7, 160)
    together = y.clone()
    lora.add(together, x, OF)
    for row in range(7):
        alone = y[row : row + 1].clone()
        lora.add(alone, x[row : row + 1], OF[row : row + 1])
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("count", [64, 65, 131])
def test_many_rows_of_few_adapters_are_each_computed_once(count: int) -> None:
    lora, factors = filled((96, 32, 32), 64, torch.float32)
    of = torch.arange(count) * 7 % 5 % 4 - 1
    x, y = torch.randn(count, 64), torch.randn(count, 160)
    wanted = expected(x, y, factors, of)
    lora.add(y, x, of)
    assert ((y.double() - wanted).abs() / wanted.abs().clamp(min=1)).max() < 1e-5


def test_a_part_that_the_adapter_does_not_target_stays() -> None:
    lora = HostLora(1, 8, 64, (32, 32), torch.float32)
    lora.fill(0, [(torch.randn(8, 64), torch.randn(32, 8))] * 2, 8)
    lora.fill(0, [(torch.randn(4, 64), torch.randn(32, 4)), None], 4)
    x, y = torch.randn(3, 64), torch.randn(3, 64)
    result = y.clone()
    lora.add(result, x, torch.zeros(3, dtype=torch.int64))
    assert torch.equal(result[:, 32:], y[:, 32:]) and not torch.equal(result[:, :32], y[:, :32])
