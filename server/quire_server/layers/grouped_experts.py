"""The experts of a layer as two stacked tensors, for a GPU: routing is computed in the kernel, so that the
host never waits for it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire_kernels import moe


class GroupedExperts:
    """The weighted sum of the experts that a token's router selects. ``targets`` are views, as in a linear
    layer.

    ``gate_up`` and ``down``: each expert's names in the checkpoint; gate and up are one name or two.
    """

    def __init__(
        self,
        gate_up: Sequence[Sequence[str]],
        down: Sequence[str],
        sizes: tuple[int, int],
        *,
        first: int = 0,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """``sizes``: hidden and intermediate. ``first``: the number of the first expert, where this rank has
        some of the model's.
        """
        self._first = first
        hidden, inner = sizes
        self._names = list(zip(gate_up, down, strict=True))
        self._gate_up = torch.empty(len(down), 2 * inner, hidden, dtype=dtype, device=device)
        self._down = torch.empty(len(down), hidden, inner, dtype=dtype, device=device)

    def __call__(self, x: Tensor, router_logits: Tensor, per_token: int, *, normalises: bool) -> Tensor:
        """x [T, hidden] and ``router_logits`` [T, experts] -> [T, hidden]."""
        return moe(
            x,
            router_logits,
            self._gate_up,
            self._down,
            per_token,
            normalises=normalises,
            first=self._first,
        )

    def targets(self) -> dict[str, Tensor]:
        """Name in the checkpoint -> the view to fill."""
        named: dict[str, Tensor] = {}
        for (gate_up, down), inner, outer in zip(self._names, self._gate_up, self._down, strict=True):
            parts = zip(gate_up, inner.chunk(len(gate_up)), strict=True)
            named |= {f"{name}.weight": part for name, part in parts} | {f"{down}.weight": outer}
        return named

    def finish(self) -> None:
        """Nothing to do: the weights are used as they were loaded."""

    def weights(self) -> Sequence[Tensor]:
        """The two stacked tensors."""
        return self._gate_up, self._down
