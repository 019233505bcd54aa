"""A decoder layer under calibration: linear layers that record statistics of their inputs, and scales that
can be folded from a matrix into what produces its inputs (SmoothQuant, arXiv:2211.10438; AWQ,
arXiv:2306.00978).

A producer is a norm, or rows of another matrix with only products in between: v before the output projection,
up before down. The inputs of routers and experts come from one norm and are not scaled, so routing is the
same as before. The algorithms work on this and know no files.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from quire_server.layers.linear import Linear
from quire_server.layers.norm import RMSNorm
from quire_server.models.config import ModelConfig
from quire_server.models.decoder import Layer
from quire_server.models.mlp import SparseMLP


class InputStatistics:
    """Second moments and magnitudes of the inputs of a matrix."""

    def __init__(self, in_size: int) -> None:
        self._count = 0
        self._products, self._sizes = torch.zeros(in_size, in_size), torch.zeros(in_size)
        self.largest = torch.zeros(in_size)  # |x|

    def add(self, x: Tensor) -> None:
        """Add inputs f32 [T, in]."""
        self._count += len(x)
        self._products.addmm_(x.T, x)
        sizes = x.abs()
        self._sizes += sizes.sum(0)
        torch.maximum(self.largest, sizes.amax(0), out=self.largest)

    @property
    def second(self) -> Tensor:
        """f32 [in, in]: the mean of x x^T; zeros without inputs, as for an expert that was never selected."""
        return self._products / max(self._count, 1)

    @property
    def sizes(self) -> Tensor:
        """f32 [in]: the mean of |x|."""
        return self._sizes / max(self._count, 1)


class ObservedLinear(Linear):
    """A dense linear layer (a ``LinearFactory``) that records its inputs between ``watch`` and ``forget``."""

    _inputs: InputStatistics | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self._inputs is not None and len(x):
            self._inputs.add(x)
        return super().__call__(x)

    @property
    def inputs(self) -> InputStatistics:
        """The recorded statistics."""
        assert self._inputs is not None, "watch() comes first"
        return self._inputs

    def watch(self) -> None:
        """Start to record."""
        self._inputs = InputStatistics(self.weight.shape[1])

    def forget(self) -> None:
        """Free the statistics."""
        self._inputs = None

    def parts(self) -> Iterator[tuple[str, slice]]:
        """Prefix and rows of each of the checkpoint's matrices in this layer."""
        start = 0
        for name, view in super().targets().items():
            if name.endswith(".weight"):
                yield name.removesuffix(".weight"), slice(start, start + len(view))
                start += len(view)


class _Producer(Protocol):
    def reduce(self, values: Tensor) -> Tensor:
        """[in] -> one value for each number that can be scaled independently."""

    def spread(self, scales: Tensor) -> Tensor:
        """The inverse of ``reduce``."""

    def divide(self, scales: Tensor) -> Tensor:
        """Divide by scales of the reduced size; returns [in]: the exact factors by which the inputs
        shrank.
        """


@dataclass(frozen=True, slots=True)
class Fold:
    """A matrix and the producer of its inputs."""

    matrix: ObservedLinear
    producer: _Producer

    def apply(self, scales: Tensor) -> Tensor:
        """Divide the inputs by the scales and multiply the columns; returns the factors [in]."""
        spread = self.producer.divide(scales)
        self.matrix.weight *= spread
        return spread


@dataclass(frozen=True, slots=True)
class _Norm:
    """``replaced`` gets the norm's new weight as it will be stored, so the columns compensate for its
    rounding too.
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
    """Rows from ``start`` on, in heads of ``size``; ``readers`` heads of the inputs read each of them."""

    matrix: ObservedLinear
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


def folds_of(
    layer: Layer, config: ModelConfig, dtype: torch.dtype, replaced: dict[str, Tensor]
) -> Iterator[Fold]:
    """Every matrix of the layer whose inputs can be scaled, in the order of computation. New values of
    tensors that are not quantised go to ``replaced``; norms in ``dtype``.
    """
    norms = {id(norm): name for name, norm in layer.norms.items()}
    offset = float(config.has_offset_norms)

    def norm_maker(norm: RMSNorm) -> _Norm:
        return _Norm(f"{norms[id(norm)]}.weight", norm, offset, dtype, replaced)

    qkv, output = cast(ObservedLinear, layer.qkv), cast(ObservedLinear, layer.output)
    v_start = (config.num_heads + config.num_kv_heads) * config.head_size
    readers = config.num_heads // config.num_kv_heads
    yield Fold(qkv, norm_maker(layer.input_norm))
    yield Fold(output, _Rows(qkv, v_start, config.num_kv_heads, readers, config.head_size, replaced))
    linears = [cast(ObservedLinear, linear) for linear in layer.mlp.linears]
    if isinstance(layer.mlp, SparseMLP):
        linears = linears[1:]
    else:
        yield Fold(linears[0], norm_maker(layer.mlp_norm))
    for gate_up, down in zip(linears[::2], linears[1::2], strict=True):
        inner = down.weight.shape[1]
        yield Fold(down, _Rows(gate_up, inner, inner, 1, 1, replaced))


def _biases(targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in targets.items() if name.endswith(".bias")}


COLUMNS = 128  # processed at once when there is no group size


@dataclass(frozen=True, slots=True)
class CalibratedLayer:
    """``scale_dtype``: the type in which scales are stored. They are rounded to it before errors are
    measured.
    """

    linears: tuple[ObservedLinear, ...]  # to be quantised, with their input statistics
    folds: tuple[Fold, ...]
    scale_dtype: torch.dtype
    group_size: int  # columns that share a scale; not used if each row has one scale

    def stored(self, scales: Tensor) -> Tensor:
        """Scales f32 as they will be read, never 0."""
        rounded = scales.to(self.scale_dtype).float()
        return torch.where(rounded > 0, rounded, 1.0)

    def fold(self, choose: Callable[[Fold, Tensor], Tensor]) -> dict[ObservedLinear, Tensor]:
        """Scale all inputs that can be scaled, by ``choose(fold, second moments of its inputs)``. Returns the
        second moments of all matrices afterwards.
        """
        moments = {linear: linear.inputs.second for linear in self.linears}
        for fold in self.folds:
            divided = fold.apply(choose(fold, moments[fold.matrix]))
            moments[fold.matrix] /= divided * divided[:, None]
        return moments
