"""The kinds of feed-forward block: one gated MLP, or several of which a router picks a few for each token,
one after the other or, on a GPU, together.

Called by ``models.decoder``. Every matrix comes from the factory that the model was given.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from quire_server.layers.activation import gelu_tanh_mul, silu_mul, silu_mul_fp8
from quire_server.layers.grouped_experts import GroupedExperts
from quire_server.layers.linear import LinearLayer, OfRounded, Weights
from quire_server.models.config import Experts, ModelConfig

MakeLinear = Callable[..., LinearLayer]  # a LinearFactory with dtype and device filled in

_ACTIVATIONS = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}


class FeedForward(Protocol):
    """[T, hidden] -> [T, hidden]."""

    @property
    def linears(self) -> Sequence[Weights]:
        """All that has weights."""

    @property
    def asks_host(self) -> bool:
        """Whether the host looks at what was computed before it goes on."""

    @property
    def of_rounded(self) -> OfRounded | None:
        """As that of a linear layer."""

    def __call__(self, x: Tensor) -> Tensor: ...


class MLP:
    """down(activation(gate) * up)."""

    asks_host = False

    def __init__(
        self, config: ModelConfig, gate_up: Sequence[str], down: str, inner: int, make: MakeLinear
    ) -> None:
        sizes = [inner, inner] if len(gate_up) == 2 else [2 * inner]
        self._gate_up = make(gate_up, config.hidden_size, sizes, bias=config.mlp_bias)
        self._down = make([down], inner, [config.hidden_size], bias=config.mlp_bias)
        self._activate = _ACTIVATIONS[config.activation]
        self._rounds = config.activation == "silu"  # into float8, where the next layer takes that
        self.linears = [self._gate_up, self._down]

    @property
    def of_rounded(self) -> OfRounded | None:
        """The first layer's, and on from there."""
        of_rounded = self._gate_up.of_rounded
        return None if of_rounded is None else lambda *rows: self._finish(of_rounded(*rows))

    def __call__(self, x: Tensor) -> Tensor:
        return self._finish(self._gate_up(x))

    def _finish(self, gate_up: Tensor) -> Tensor:
        if self._rounds and (of_rounded := self._down.of_rounded) is not None:
            return of_rounded(*silu_mul_fp8(gate_up))
        return self._down(self._activate(gate_up))


class SparseMLP:
    """The weighted sum of the experts that the router likes best (arXiv:1701.06538, softmax over all
    experts).

    Each expert that is wanted by any token runs once, on the tokens that want it: a token's result does not
    depend on who else is in the batch.
    """

    asks_host = True
    of_rounded: OfRounded | None = None  # its router takes no float8

    def __init__(self, config: ModelConfig, experts: Experts, prefix: str, make: MakeLinear) -> None:
        self._settings = experts
        self._router = _router(config, experts, prefix, make)
        self._experts = [
            MLP(config, gate_up, down, experts.intermediate_size, make)
            for gate_up, down in _expert_names(config, experts, prefix)
        ]
        self.linears = [self._router, *(linear for mlp in self._experts for linear in mlp.linears)]

    def __call__(self, x: Tensor) -> Tensor:
        likes = torch.softmax(self._router(x).float(), dim=-1)
        weights, chosen = likes.topk(self._settings.per_token, dim=-1)
        if self._settings.normalises_weights:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows, ranks = torch.where(chosen == number)
            part = self._experts[number](x[rows])
            out.index_add_(0, rows, part * weights[rows, ranks, None].to(part.dtype))
        return out


class GroupedSparseMLP:
    """The same, where a kernel multiplies each token with its experts' matrices: dense ones, on a GPU. Its
    launches depend on the number of tokens alone, so a graph can capture them.
    """

    asks_host = False
    of_rounded: OfRounded | None = None

    def __init__(
        self,
        config: ModelConfig,
        experts: Experts,
        prefix: str,
        make: MakeLinear,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        gate_up, down = zip(*_expert_names(config, experts, prefix), strict=True)
        sizes = config.hidden_size, experts.intermediate_size
        self._settings = experts
        self._router = _router(config, experts, prefix, make)
        self._experts = GroupedExperts(gate_up, down, sizes, dtype=dtype, device=device)
        self.linears: list[Weights] = [self._router, self._experts]

    def __call__(self, x: Tensor) -> Tensor:
        settings = self._settings
        return self._experts(x, self._router(x), settings.per_token, normalises=settings.normalises_weights)


def _router(config: ModelConfig, experts: Experts, prefix: str, make: MakeLinear) -> LinearLayer:
    return make([f"{prefix}.{config.names.router}"], config.hidden_size, [experts.count], bias=False)


def _expert_names(config: ModelConfig, experts: Experts, prefix: str) -> list[tuple[list[str], str]]:
    """(gates and ups, downs) of each, in the checkpoint."""
    names = config.names
    return [
        (
            [f"{prefix}.{name.format(number)}" for name in names.expert_gate_up],
            f"{prefix}.{names.expert_down.format(number)}",
        )
        for number in range(experts.count)
    ]
