"""Triton kernel of `one_shot_all_reduce`, imported only where there is a GPU (why: `add_rmsnorm_triton`).

A program waits for the programs of its own number on the other ranks and for nothing else, so no rank needs
all of its programs to run at the same time.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.launch_config import LaunchConfig
from quire_kernels.one_shot_place import (
    MAX_BYTES,
    PROGRAM_BYTES,
    OneShotPlace,
    can_one_shot,
    flags_bytes,
)

_WARPS = 4


def one_shot_all_reduce_triton(part: Tensor, place: OneShotPlace) -> Tensor:
    """As ``one_shot_all_reduce``, in place."""
    if not can_one_shot(part) or not part.is_contiguous():
        raise ValueError(
            f"one_shot_all_reduce: a part of {part.nbytes} bytes of {part.dtype} must be contiguous, of at "
            f"most {MAX_BYTES} bytes, and of 16 or 32 bits an element"
        )
    if not part.numel():
        return part
    ranks, block = place.addresses.shape[0], PROGRAM_BYTES // part.element_size()
    one_shot_all_reduce_kernel[(triton.cdiv(part.numel(), block),)](
        part, place.addresses, place.epochs, part.numel(), place.rank, RANKS=ranks, BLOCK=block,
        FLAGS=flags_bytes(ranks), HALF=MAX_BYTES, num_warps=_WARPS,
    )  # fmt: skip
    return part


@triton.jit
def one_shot_all_reduce_kernel(
    part_ptr, addresses_ptr, epochs_ptr, size, rank,
    RANKS: tl.constexpr, BLOCK: tl.constexpr, FLAGS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    at = program * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    pointer = tl.pointer_type(part_ptr.dtype.element_ty)
    epoch = tl.load(epochs_ptr + program) + 1
    half = FLAGS + (epoch & 1).to(tl.int64) * HALF
    mine = tl.multiple_of((tl.load(addresses_ptr + rank) + half).to(pointer), 16)
    tl.store(mine + at, tl.load(part_ptr + at, mask=inside), mask=inside)
    # All threads have written before one of them sets the others' flags.
    tl.debug_barrier()
    for peer in tl.static_range(RANKS):
        flags = tl.load(addresses_ptr + peer).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(flags + program * RANKS + rank, epoch, sem="release", scope="sys")
    own = tl.load(addresses_ptr + rank).to(tl.pointer_type(tl.int32)) + program * RANKS
    for peer in tl.static_range(RANKS):
        # The difference, because the count may pass the largest integer.
        seen = tl.atomic_add(own + peer, 0, sem="acquire", scope="sys")
        while seen - epoch < 0:
            seen = tl.atomic_add(own + peer, 0, sem="acquire", scope="sys")
    tl.debug_barrier()
    total = _part(addresses_ptr, 0, half, pointer, at, inside)
    for peer in tl.static_range(1, RANKS):
        total += _part(addresses_ptr, peer, half, pointer, at, inside)
    tl.store(part_ptr + at, total.to(part_ptr.dtype.element_ty), mask=inside)
    tl.store(epochs_ptr + program, epoch)


@triton.jit
def _part(addresses_ptr, peer, half, pointer: tl.constexpr, at, inside):
    given = tl.multiple_of((tl.load(addresses_ptr + peer) + half).to(pointer), 16)
    return tl.load(given + at, mask=inside, other=0.0).to(tl.float32)


def _launch_config(ranks: int, dtype: str, itemsize: int) -> LaunchConfig:
    return LaunchConfig(
        f"one_shot_all_reduce, {ranks} ranks, {dtype}",
        one_shot_all_reduce_kernel,
        {
            "part_ptr": f"*{dtype}", "addresses_ptr": "*i64", "epochs_ptr": "*i32", "size": "i32",
            "rank": "i32",
        },
        {
            "RANKS": ranks, "BLOCK": PROGRAM_BYTES // itemsize, "FLAGS": flags_bytes(ranks),
            "HALF": MAX_BYTES,
        },
        warps=_WARPS,
        aligned=frozenset({"size"}),
        expects=("load128", "store128"),
        min_blocks=4,
    )  # fmt: skip


LAUNCH_CONFIGS = tuple(
    _launch_config(ranks, dtype, size)
    for ranks, dtype, size in (
        (2, "bf16", 2),
        (4, "bf16", 2),
        (8, "bf16", 2),
        (2, "fp32", 4),
    )
)
