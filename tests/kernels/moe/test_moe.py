"""The reference equals the models' own MoE block on a CPU."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from quire_kernels.moe.moe import moe
from quire_server.models.config import Experts, TensorNames
from quire_server.models.mlp import SparseMLP

HIDDEN, INNER, COUNT, PER_TOKEN = 24, 16, 6, 3


class Dense:
    forward_fp8 = None

    def __init__(self, prefixes: list[str], inputs: int, outputs: list[int], *, bias: bool) -> None:
        assert not bias
        self.prefixes, self.weight = prefixes, torch.randn(sum(outputs), inputs) * 0.2

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


@pytest.mark.parametrize("normalises", [False, True])
def test_routing_weights_equal_those_of_the_models(normalises: bool) -> None:
    config = SimpleNamespace(
        names=TensorNames(), hidden_size=HIDDEN, mlp_bias=False, activation="silu", num_layers=1
    )
    block = SparseMLP(config, Experts(COUNT, PER_TOKEN, INNER, normalises), "mlp", Dense)
    router, *experts = block.linears
    x = torch.randn(9, HIDDEN)
    gate_up = torch.stack([linear.weight for linear in experts[::2]])
    down = torch.stack([linear.weight for linear in experts[1::2]])
    given = moe(x, router(x), gate_up, down, PER_TOKEN, normalises=normalises)
    torch.testing.assert_close(given, block(x))
