"""A dense linear layer that remembers what went into it. A ``LinearFactory``: ``source`` builds layers of it,
``calibration`` shows them a text, the algorithms ask them.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from quire_server.layers.linear import Linear


class Inputs:
    """How the inputs of a matrix vary together, and how large they are."""

    def __init__(self, in_size: int) -> None:
        self._count = 0
        self._products, self._sizes = torch.zeros(in_size, in_size), torch.zeros(in_size)
        self.largest = torch.zeros(in_size)  # |x|

    def add(self, x: Tensor) -> None:
        """More of them: f32 [T, in]."""
        self._count += len(x)
        self._products.addmm_(x.T, x)
        sizes = x.abs()
        self._sizes += sizes.sum(0)
        torch.maximum(self.largest, sizes.amax(0), out=self.largest)

    @property
    def second(self) -> Tensor:
        """f32 [in, in]: the mean of x x^T; zeros where nothing came, as with an expert that nobody chose."""
        return self._products / max(self._count, 1)

    @property
    def sizes(self) -> Tensor:
        """f32 [in]: the mean of |x|."""
        return self._sizes / max(self._count, 1)


class Watched(Linear):
    """Remembers from ``watch`` on until ``forget``."""

    _inputs: Inputs | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self._inputs is not None and len(x):
            self._inputs.add(x)
        return super().__call__(x)

    @property
    def inputs(self) -> Inputs:
        """What it remembers."""
        assert self._inputs is not None, "watch() comes first"
        return self._inputs

    def watch(self) -> None:
        """Start to remember."""
        self._inputs = Inputs(self.weight.shape[1])

    def forget(self) -> None:
        """Give the memory back."""
        self._inputs = None

    def parts(self) -> Iterator[tuple[str, slice]]:
        """Each matrix of the checkpoint that is in here, by its prefix, and its rows."""
        start = 0
        for name, view in super().targets().items():
            if name.endswith(".weight"):
                yield name.removesuffix(".weight"), slice(start, start + len(view))
                start += len(view)
