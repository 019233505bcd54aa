"""LoRA in Triton equals its reference, one token at a time."""

from typing import Any

import pytest
import torch
from torch import Tensor

from quire_kernels.lora.add_lora import add_lora_reference
from quire_kernels.lora.add_lora_triton import add_lora_triton, lora_splits
from quire_kernels.moe.group_rows import group_rows
from tests.kernels.gpu.pairwise import cases
from tests.kernels.gpu.tolerances import assert_near


def adapters_of(
    tokens: int, inputs: int, sizes: tuple[int, ...], rank: int, count: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y, x, a, b, and each token's adapter."""
    outputs = sum(sizes)
    x = torch.randn(tokens, inputs + 8, device=device).to(dtype)[:, 8:]
    a = (torch.randn(count, len(sizes) * rank, inputs, device=device) * inputs**-0.5).to(dtype)
    b = torch.randn(count, outputs, rank, device=device).to(dtype)
    y = torch.randn(tokens, outputs + 5, device=device).to(dtype)
    of = torch.randint(-1, count, (tokens,), dtype=torch.int32, device=device)
    return y, x, a, b, of


FACTORS: dict[str, Any] = {
    "tokens": [5, 1, 33, 123, 0],
    "inputs": [123, 1, 257, 300, 576],
    "sizes": [(64, 24, 24), (192,), (130, 5), (40,)],
    "rank": [8, 16, 1, 20, 32],
    "count": [3, 1, 4],
    "size": [16, 64],
    "dtype": [torch.bfloat16, torch.float32, torch.float16],
    "splits": [1, 2, 8],
}


@pytest.mark.parametrize("case", cases(FACTORS), ids=str)
def test_each_token_gets_the_update_of_its_own_adapter(
    case: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire_kernels.lora.add_lora_triton.lora_splits", lambda *_: case["splits"])
    names = ("tokens", "inputs", "sizes", "rank", "count", "dtype")
    whole, x, a, b, of = adapters_of(*(case[name] for name in names), device)
    of[:1] = 0
    sizes, outputs = case["sizes"], sum(case["sizes"])
    groups = group_rows(of, case["count"], case["size"])
    y, around = whole[:, :outputs], whole[:, outputs:].clone()
    before = y.clone()
    expected = add_lora_reference(y.clone(), x, a, b, groups, sizes)
    assert add_lora_triton(y, x, a, b, groups, sizes) is y
    assert_near(y, expected, largest=1e-5 if case["dtype"] == torch.float32 else 8e-3)
    assert torch.equal(y[of < 0], before[of < 0])
    assert not case["tokens"] or not torch.equal(y[0], before[0])
    assert torch.equal(whole[:, outputs:], around)


def test_a_batch_without_adapters_is_unchanged(device: str) -> None:
    whole, x, a, b, of = adapters_of(3, 64, (32,), 16, 2, torch.float32, device)
    y, before = whole[:, :32], whole[:, :32].clone()
    add_lora_triton(y, x, a, b, group_rows(torch.full_like(of, -1), 2, 16), (32,))
    assert torch.equal(y, before)


def test_nan_affects_only_its_token_and_its_adapter(device: str) -> None:
    whole, x, a, b, of = adapters_of(4, 70, (40,), 16, 3, torch.float32, device)
    of[:] = torch.tensor([0, -1, 0, 2], dtype=torch.int32, device=device)
    x[1], x[2], a[1], b[1] = (float("nan"),) * 4
    y = add_lora_triton(whole[:, :40], x, a, b, group_rows(of, 3, 16), (40,))
    assert y[[0, 1, 3]].isfinite().all() and y[2].isnan().all()


def test_splits_of_the_inputs_fill_the_multiprocessors() -> None:
    assert lora_splits(1, 4096, 132) == 8 and lora_splits(40, 4096, 132) == 2
    assert lora_splits(1, 576, 132) == 2 and lora_splits(300, 4096, 132) == 1


def test_shapes_that_do_not_fit_are_refused(device: str) -> None:
    whole, x, a, b, of = adapters_of(3, 64, (32,), 16, 2, torch.float32, device)
    groups = group_rows(of, 2, 16)
    with pytest.raises(ValueError, match="do not fit"):
        add_lora_triton(whole[:, :32], x, a, b, groups, (16, 16))
    with pytest.raises(ValueError, match=r"y must be \[3, 32\]"):
        add_lora_triton(whole, x, a, b, groups, (32,))
