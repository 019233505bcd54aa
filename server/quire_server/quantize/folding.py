"""Scaling the inputs of a matrix without changing the model: what makes them is divided by the scales, and
the columns that they meet are multiplied (SmoothQuant, arXiv:2211.10438; AWQ, arXiv:2306.00978).

Called by the algorithms. The maker is a norm, or rows of another matrix with nothing but products behind
them: v before the output projection, up before down. The inputs of routers and experts come from one norm
and stay as they are, so that the router sees what it saw.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from quire_server.layers.norm import RMSNorm
from quire_server.models.config import ModelConfig
from quire_server.models.decoder import Layer
from quire_server.models.mlp import SparseMLP
from quire_server.quantize.watched import Watched


class _Maker(Protocol):
    def reduce(self, values: Tensor) -> Tensor:
        """[in] -> one for each number that can be scaled by itself."""

    def spread(self, scales: Tensor) -> Tensor:
        """The other way."""

    def divide(self, scales: Tensor) -> Tensor:
        """Divide by scales of that size; [in]: by what the inputs became smaller, to the last bit."""


@dataclass(frozen=True, slots=True)
class Fold:
    """A matrix and what makes its inputs."""

    matrix: Watched
    maker: _Maker

    def apply(self, scales: Tensor) -> Tensor:
        """Divide the inputs, multiply the columns; [in]: by what."""
        spread = self.maker.divide(scales)
        self.matrix.weight *= spread
        return spread


@dataclass(frozen=True, slots=True)
class _Norm:
    """``replaced`` takes the norm's new weight, as it will be stored: rounded, so the columns follow what it
    became.
    """

    name: str
    norm: RMSNorm
    offset: float
    dtype: torch.dtype
    replaced: dict[str, Tensor]

    def reduce(self, values: Tensor) -> Tensor:
        return values

    def spread(self, scales: Tensor) -> Tensor:
        return scales

    def divide(self, scales: Tensor) -> Tensor:
        before = self.norm.weight.clone()
        stored = (before / scales - self.offset).to(self.dtype)
        self.norm.weight.copy_(stored.float() + self.offset)
        self.replaced[self.name] = stored
        return torch.where(self.norm.weight != 0, before / self.norm.weight, scales)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows from ``start`` on, in heads of ``size``; each head is read by ``readers`` heads of the inputs."""

    matrix: Watched
    start: int
    heads: int
    readers: int
    size: int
    replaced: dict[str, Tensor]

    def reduce(self, values: Tensor) -> Tensor:
        return values.view(self.heads, self.readers, self.size).mean(1).flatten()

    def spread(self, scales: Tensor) -> Tensor:
        return scales.view(self.heads, 1, self.size).expand(-1, self.readers, -1).flatten()

    def divide(self, scales: Tensor) -> Tensor:
        rows = slice(self.start, self.start + len(scales))
        self.matrix.weight[rows] /= scales[:, None]
        if self.matrix.bias is not None:
            self.matrix.bias[rows] /= scales
            self.replaced.update(_biases(self.matrix.targets()))
        return self.spread(scales)


def folds(
    layer: Layer, config: ModelConfig, dtype: torch.dtype, replaced: dict[str, Tensor]
) -> Iterator[Fold]:
    """Every matrix of the layer whose inputs can be scaled, in the order of computing. New values of tensors
    that are not quantised go to ``replaced``, in ``dtype`` where they are norms.
    """
    norms = {id(norm): name for name, norm in layer.norms.items()}
    offset = float(config.has_offset_norms)

    def norm_maker(norm: RMSNorm) -> _Norm:
        return _Norm(f"{norms[id(norm)]}.weight", norm, offset, dtype, replaced)

    qkv, output = cast(Watched, layer.qkv), cast(Watched, layer.output)
    v_start = (config.num_heads + config.num_kv_heads) * config.head_size
    readers = config.num_heads // config.num_kv_heads
    yield Fold(qkv, norm_maker(layer.input_norm))
    yield Fold(output, _Rows(qkv, v_start, config.num_kv_heads, readers, config.head_size, replaced))
    linears = [cast(Watched, linear) for linear in layer.mlp.linears]
    if isinstance(layer.mlp, SparseMLP):
        linears = linears[1:]
    else:
        yield Fold(linears[0], norm_maker(layer.mlp_norm))
    for gate_up, down in zip(linears[::2], linears[1::2], strict=True):
        inner = down.weight.shape[1]
        yield Fold(down, _Rows(gate_up, inner, inner, 1, 1, replaced))


def _biases(targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in targets.items() if name.endswith(".bias")}
