"""The C function that draws tokens (csrc/sample_tokens.c), on any x86-64 CPU; `TOKEN_SAMPLER` is None unless
it is built.
"""

import torch
from torch import Tensor

from quire_kernels.cpu.library import LIBRARY, Library, arguments
from quire_kernels.cpu.native import NATIVE

_SMALL = 200_000  # logits; finding the largest of so many costs less than a second thread
_KERNELS = {
    "sample_tokens": arguments(
        "logits rows temperature top_k top_p min_p seeds positions tokens largest", "vocab"
    )
}


class TokenSampler:
    """Typed calls of the C function, which checks nothing. ``instructions``: the set that it is compiled for,
    ``any`` for every CPU.
    """

    def __init__(self, library: Library, instructions: str) -> None:
        self._library = library
        self._kernel = library.kernels(_KERNELS, instructions)["sample_tokens"]

    def supports(self, logits: Tensor) -> bool:
        """Whether it can read these logits."""
        return logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.is_contiguous()

    def sample(
        self,
        logits: Tensor,
        rows: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        seeds: Tensor,
        positions: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """As ``sample_tokens_reference``."""
        count, vocab = rows.shape[0], logits.shape[1]
        tokens, largest = torch.empty(count, dtype=torch.int64), torch.empty(count)
        given = [rows, temperature, top_k, top_p, min_p, seeds, positions]
        given = [logits, *(one.contiguous() for one in given), tokens, largest]
        self._library.call(
            self._kernel, count, count * vocab > _SMALL, *(one.data_ptr() for one in given), vocab
        )
        return tokens, largest


TOKEN_SAMPLER = None if LIBRARY is None else TokenSampler(LIBRARY, "any" if NATIVE is None else NATIVE.isa)
