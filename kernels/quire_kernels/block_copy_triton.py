"""Triton kernel of `block_copy`: one launch copies all blocks of all layers.

Imported only where there is a GPU (why: `add_rmsnorm_triton`). Each layer is a tensor of its own, so the
kernel takes a table of their addresses; a program copies a part of one block of one layer.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.launch_config import LaunchConfig

_WORD, _BLOCK, _WARPS = 4, 4096, 4  # bytes per word; words per program


def block_copy_triton(
    sources: Sequence[Tensor], targets: Sequence[Tensor], pairs: Tensor, tables: tuple[Tensor, Tensor]
) -> None:
    """Copy block ``pair[0]`` of each of ``sources`` to block ``pair[1]`` of its target, all [blocks, ...].
    ``pairs`` i64 [N, 2]. ``tables``: i64, the addresses of the sources and of the targets.

    A block must be contiguous and a multiple of 16 bytes. No block may be both read and written.
    """
    first, target = sources[0], targets[0]
    block_bytes = first[0].numel() * first.element_size()
    for name, given in (("sources", sources), ("targets", targets)):
        alike = {(part.stride(), part.shape[1:], part.dtype) for part in given}
        if len(alike) != 1 or not given[0][0].is_contiguous():
            raise ValueError(f"block_copy: {name} must be alike, and a block of theirs in one piece")
    if first.shape[1:] != target.shape[1:] or first.dtype != target.dtype or len(sources) != len(targets):
        raise ValueError("block_copy: sources and targets must hold blocks of the same shape and type")
    strides = [part.stride(0) * part.element_size() for part in (first, target)]
    places = [part.data_ptr() for given in (sources, targets) for part in given]
    if any(number % 16 for number in (block_bytes, *strides, *places)):
        raise ValueError(f"block_copy: blocks of {block_bytes} bytes must be, and lie at, multiples of 16")
    words = block_bytes // _WORD
    block_copy_kernel[(len(pairs), len(sources), triton.cdiv(words, _BLOCK))](
        *tables,
        pairs,
        strides[0] // _WORD,
        strides[1] // _WORD,
        words,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )


@triton.jit
def block_copy_kernel(
    sources_ptr, targets_ptr, pairs_ptr, source_stride, target_stride, words, BLOCK: tl.constexpr
):  # fmt: skip
    pair, part = tl.program_id(0), tl.program_id(1)
    source = tl.load(sources_ptr + part).to(tl.pointer_type(tl.int32))
    target = tl.load(targets_ptr + part).to(tl.pointer_type(tl.int32))
    # Checked by the launch: addresses are multiples of 16 bytes.
    source, target = tl.multiple_of(source, 16), tl.multiple_of(target, 16)
    source += tl.load(pairs_ptr + 2 * pair) * source_stride
    target += tl.load(pairs_ptr + 2 * pair + 1) * target_stride
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < words), mask=at < words)


_STRIDES = ("source_stride", "target_stride", "words")
LAUNCH_CONFIGS = (
    LaunchConfig(
        "block_copy",
        block_copy_kernel,
        {"sources_ptr": "*i64", "targets_ptr": "*i64", "pairs_ptr": "*i64"} | dict.fromkeys(_STRIDES, "i32"),
        {"BLOCK": _BLOCK},
        warps=_WARPS,
        aligned=frozenset(_STRIDES),
        expects=("load128", "store128"),
        min_blocks=8,
    ),
)
