"""Triton kernel of `apply_token_bitmask`, imported only where there is a GPU (why: `add_rmsnorm_triton`)."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.launch_config import LaunchConfig

_BLOCK, _WARPS = 2048, 4


def apply_token_bitmask_triton(
    logits: Tensor, bitmask: Tensor, positions: Tensor, *, out: Tensor | None = None
) -> Tensor:
    """As ``apply_token_bitmask``. The elements of a row must be contiguous."""
    out = logits.clone() if out is None else out.copy_(logits)
    vocab_size, words = logits.shape[1], triton.cdiv(logits.shape[1], 32)
    if bitmask.shape != (positions.shape[0], words) or bitmask.stride(-1) != 1 or out.stride(-1) != 1:
        raise ValueError(
            f"apply_token_bitmask: bitmask must be [{positions.shape[0]}, {words}], and it and out hold "
            "adjacent elements a row"
        )
    token_bitmask_kernel[(positions.shape[0], triton.cdiv(vocab_size, _BLOCK))](
        out, bitmask, positions, out.stride(0), bitmask.stride(0), vocab_size, BLOCK=_BLOCK, num_warps=_WARPS
    )
    return out


@triton.jit
def token_bitmask_kernel(
    out_ptr, bitmask_ptr, positions_ptr, out_stride, bitmask_stride, vocab_size, BLOCK: tl.constexpr
):
    entry = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + entry)
    if position >= 0:
        word = tl.program_id(1) * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
        bit = tl.arange(0, 32)
        at = word[:, None] * 32 + bit[None, :]
        inside = at < vocab_size
        words = tl.load(bitmask_ptr + entry * bitmask_stride + word, mask=word * 32 < vocab_size, other=0)
        allowed = (words[:, None] >> bit[None, :]) & 1
        place = out_ptr + position * out_stride + at
        # Allowed logits are stored again too: a masked store would not be 128 bits wide.
        x = tl.load(place, mask=inside, other=0.0)
        tl.store(place, tl.where(allowed != 0, x, float("-inf")), mask=inside)


LAUNCH_CONFIGS = (
    LaunchConfig(
        "token_bitmask fp32",
        token_bitmask_kernel,
        {
            "out_ptr": "*fp32",
            "bitmask_ptr": "*i32",
            "positions_ptr": "*i64",
            "out_stride": "i32",
            "bitmask_stride": "i32",
            "vocab_size": "i32",
        },
        {"BLOCK": _BLOCK},
        warps=_WARPS,
        aligned=frozenset({"out_stride", "vocab_size"}),
        expects=("load128", "store128"),
        min_blocks=8,
    ),
)
