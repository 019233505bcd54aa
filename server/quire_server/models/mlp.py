"""Feed-forward blocks: one gated MLP, or experts of which a router selects a few per token, computed one
after the other or, on a GPU, together. Every matrix comes from the factory that the model was given.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from quire_server.layers.grouped_experts import GroupedExperts
from quire_server.layers.linear import Fp8Forward, LinearLayer, LinearMaker, Weights
from quire_server.layers.ops import gelu_tanh_mul, silu_mul, silu_mul_fp8
from quire_server.models.config import Experts, ModelConfig

#: Puts LoRA adapters beside a filled linear layer of these names, [in] -> [sum of the sizes].
Adapt = Callable[[Sequence[str], LinearLayer, int, Sequence[int]], LinearLayer]

_ACTIVATIONS = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}


class FeedForward(Protocol):
    """[T, hidden] -> [T, hidden]."""

    @property
    def linears(self) -> Sequence[Weights]:
        """Everything that has weights."""

    @property
    def needs_host_sync(self) -> bool:
        """Whether the host waits for results in the middle of the computation."""

    @property
    def forward_fp8(self) -> Fp8Forward | None:
        """As in ``LinearLayer``."""

    def __call__(self, x: Tensor) -> Tensor: ...


class MLP:
    """down(activation(gate) * up)."""

    needs_host_sync = False

    def __init__(
        self, config: ModelConfig, gate_up: Sequence[str], down: str, inner: int, make: LinearMaker
    ) -> None:
        sizes = [inner, inner] if len(gate_up) == 2 else [2 * inner]
        self._names, self._sizes = (list(gate_up), down), sizes
        self._hidden, self._inner = config.hidden_size, inner
        self._gate_up = make(gate_up, config.hidden_size, sizes, bias=config.mlp_bias)
        # Ranks add their parts, so that one of them has the bias.
        self._down = make(
            [down], inner, [config.hidden_size], bias=config.mlp_bias and config.topology.tensor_rank == 0
        )
        self._activate = _ACTIVATIONS[config.activation]
        self._rounds = config.activation == "silu"  # fused into FP8 if the next layer takes it
        self.linears = [self._gate_up, self._down]

    def adapt(self, adapt: Adapt) -> None:
        """Put LoRA adapters beside both matrices."""
        gate_up, down = self._names
        self._gate_up = adapt(gate_up, self._gate_up, self._hidden, self._sizes)
        self._down = adapt([down], self._down, self._inner, [self._hidden])

    @property
    def forward_fp8(self) -> Fp8Forward | None:
        """The whole block on FP8 rows, if its first layer takes them."""
        forward_fp8 = self._gate_up.forward_fp8
        return None if forward_fp8 is None else lambda *rows: self._finish(forward_fp8(*rows))

    def __call__(self, x: Tensor) -> Tensor:
        return self._finish(self._gate_up(x))

    def _finish(self, gate_up: Tensor) -> Tensor:
        if self._rounds and (forward_fp8 := self._down.forward_fp8) is not None:
            return forward_fp8(*silu_mul_fp8(gate_up))
        return self._down(self._activate(gate_up))


class SparseMLP:
    """The weighted sum of the experts that the router selects (arXiv:1701.06538, softmax over all experts).
    A rank of several sums its own experts.

    Each selected expert runs once, on the tokens that selected it: a token's result does not depend on the
    rest of the batch.
    """

    needs_host_sync = True
    forward_fp8: Fp8Forward | None = None  # the router does not take FP8 rows

    def __init__(self, config: ModelConfig, experts: Experts, prefix: str, make: LinearMaker) -> None:
        self._settings = experts
        self._router = _router(config, experts, prefix, make)
        self._experts = {
            number: MLP(config, gate_up, down, experts.intermediate_size, make)
            for number, (gate_up, down) in _expert_names(config, experts, prefix).items()
        }
        self.linears = [self._router, *(linear for mlp in self._experts.values() for linear in mlp.linears)]

    def __call__(self, x: Tensor) -> Tensor:
        probabilities = torch.softmax(self._router(x).float(), dim=-1)
        weights, chosen = probabilities.topk(self._settings.per_token, dim=-1)
        if self._settings.normalises_weights:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            if (expert := self._experts.get(number)) is None:
                continue  # another rank's
            rows, places = torch.where(chosen == number)
            part = expert(x[rows])
            out.index_add_(0, rows, part * weights[rows, places, None].to(part.dtype))
        return out


class GroupedSparseMLP:
    """The same by one grouped kernel, for dense experts on a GPU. Its launches depend only on the number of
    tokens, so a CUDA graph can capture them.
    """

    needs_host_sync = False
    forward_fp8: Fp8Forward | None = None

    def __init__(self, config: ModelConfig, experts: Experts, prefix: str, make: LinearMaker) -> None:
        gate_up, down = zip(*_expert_names(config, experts, prefix).values(), strict=True)
        sizes = config.hidden_size, experts.intermediate_size
        self._settings = experts
        self._router = _router(config, experts, prefix, make)
        first = min(experts.numbers)
        self._experts = GroupedExperts(
            gate_up, down, sizes, first=first, dtype=make.dtype, device=make.device
        )
        self.linears: list[Weights] = [self._router, self._experts]

    def __call__(self, x: Tensor) -> Tensor:
        settings = self._settings
        return self._experts(x, self._router(x), settings.per_token, normalises=settings.normalises_weights)


def _router(config: ModelConfig, experts: Experts, prefix: str, make: LinearMaker) -> LinearLayer:
    return make([f"{prefix}.{config.names.router}"], config.hidden_size, [experts.count], bias=False)


def _expert_names(config: ModelConfig, experts: Experts, prefix: str) -> dict[int, tuple[list[str], str]]:
    """(names of gate and up, name of down) in the checkpoint of each expert that this rank has."""
    names = config.names
    return {
        number: (
            [f"{prefix}.{name.format(number)}" for name in names.expert_gate_up],
            f"{prefix}.{names.expert_down.format(number)}",
        )
        for number in experts.numbers
    }
