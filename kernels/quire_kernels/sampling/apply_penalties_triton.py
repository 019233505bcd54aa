"""Triton kernels of `apply_penalties`, imported only where there is a GPU (why: `add_rmsnorm_triton`).

One kernel counts the tokens of the contexts into a table, by integer atomics, whose order does not matter;
the other applies the counts and clears the table for the next step.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.launch_config import LaunchConfig

_BLOCK, _WARPS = 1024, 4


def apply_penalties_triton(
    logits: Tensor,
    tokens: Tensor,
    rows: Tensor,
    prompt_lengths: Tensor,
    lengths: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    *,
    out: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """As ``apply_penalties``. The elements of a row must be contiguous.

    ``counts``: workspace i32 [B, V] of zeros, which is zeros again afterwards; allocated if None.
    """
    positions, vocab_size = logits.shape
    out = torch.empty_like(logits, memory_format=torch.contiguous_format) if out is None else out
    if counts is None:
        counts = torch.zeros(positions, vocab_size, dtype=torch.int32, device=logits.device)
    for name, given in (("logits", logits), ("out", out), ("counts", counts)):
        if given.shape != (positions, vocab_size) or given.stride(-1) != 1:
            raise ValueError(
                f"apply_penalties: {name} must be [{positions}, {vocab_size}], adjacent elements a row"
            )
    if tokens.stride(-1) != 1:
        raise ValueError("apply_penalties: tokens must hold adjacent elements a row")
    if counts.dtype != torch.int32 or presence.dtype != torch.float64 or frequency.dtype != torch.float64:
        raise ValueError("apply_penalties: counts must be int32, presence and frequency float64")
    count_kernel[(positions, triton.cdiv(tokens.shape[1], _BLOCK))](
        tokens, rows, prompt_lengths, lengths, repetition, presence, frequency, counts, tokens.shape[1],
        tokens.stride(0), counts.stride(0), vocab_size, BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
    penalties_kernel[(positions, triton.cdiv(vocab_size, _BLOCK))](
        logits, counts, repetition, presence, frequency, out,
        logits.stride(0), counts.stride(0), out.stride(0), vocab_size, BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
    return out


@triton.jit
def count_kernel(
    tokens_ptr, rows_ptr, prompt_lengths_ptr, lengths_ptr, repetition_ptr, presence_ptr, frequency_ptr,
    counts_ptr, width, tokens_stride, counts_stride, vocab_size, BLOCK: tl.constexpr,
):  # fmt: skip
    """Counts: 2 for each occurrence after the prompt, plus 1 if the token is in the prompt."""
    position = tl.program_id(0).to(tl.int64)
    repeats = tl.load(repetition_ptr + position) != 1
    takes = (tl.load(presence_ptr + position) != 0) | (tl.load(frequency_ptr + position) != 0)
    length, first = tl.load(lengths_ptr + position), tl.program_id(1) * BLOCK
    if (repeats | takes) & (first < length):
        at = first + tl.arange(0, BLOCK)
        row = tl.load(rows_ptr + position)
        # Masked by the table's width, which is aligned for wide loads, unlike a length.
        token = tl.load(tokens_ptr + row * tokens_stride + at, mask=at < width, other=-1)
        known = (at < length) & (token >= 0) & (token < vocab_size)
        in_prompt = at < tl.load(prompt_lengths_ptr + position)
        place = counts_ptr + position * counts_stride + token
        tl.atomic_or(place, 1, mask=known & in_prompt, sem="relaxed")
        tl.atomic_add(place, 2, mask=known & (in_prompt == 0), sem="relaxed")


@triton.jit
def penalties_kernel(
    logits_ptr, counts_ptr, repetition_ptr, presence_ptr, frequency_ptr, out_ptr,
    logits_stride, counts_stride, out_stride, vocab_size, BLOCK: tl.constexpr,
):  # fmt: skip
    position = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab_size
    x = tl.load(logits_ptr + position * logits_stride + at, mask=inside, other=0.0).to(tl.float32)
    count_place = counts_ptr + position * counts_stride + at
    count = tl.load(count_place, mask=inside, other=0)
    factor = tl.zeros([BLOCK], tl.float32) + tl.load(repetition_ptr + position)
    x = tl.where(count != 0, tl.where(x > 0, tl.div_rn(x, factor), x * factor), x)
    times = (count >> 1).to(tl.float64)
    taken = (tl.load(presence_ptr + position) + tl.load(frequency_ptr + position) * times).to(tl.float32)
    x = tl.where(times > 0, x - taken, x)
    tl.store(out_ptr + position * out_stride + at, x.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(count_place, tl.zeros([BLOCK], tl.int32), mask=inside & (count != 0))


_PARAMETERS = {"repetition_ptr": "*fp32", "presence_ptr": "*fp64", "frequency_ptr": "*fp64"}
_STRIDES = {"counts_stride": "i32", "vocab_size": "i32"}

LAUNCH_CONFIGS = (
    LaunchConfig(
        "penalties, counted",
        count_kernel,
        {
            "tokens_ptr": "*i32", "rows_ptr": "*i64", "prompt_lengths_ptr": "*i64", "lengths_ptr": "*i64",
            "counts_ptr": "*i32", "width": "i32", "tokens_stride": "i32", **_PARAMETERS, **_STRIDES,
        },
        {"BLOCK": _BLOCK},
        warps=_WARPS,
        aligned=frozenset({"width", "tokens_stride", *_STRIDES}),
        expects=("load128",),
        min_blocks=8,
    ),
    LaunchConfig(
        "penalties, applied fp32",
        penalties_kernel,
        {
            "logits_ptr": "*fp32", "counts_ptr": "*i32", "out_ptr": "*fp32", "logits_stride": "i32",
            "out_stride": "i32", **_PARAMETERS, **_STRIDES,
        },
        {"BLOCK": _BLOCK},
        warps=_WARPS,
        aligned=frozenset({"logits_stride", "out_stride", *_STRIDES}),
        expects=("load128", "store128"),
        min_blocks=8,
    ),
)  # fmt: skip
