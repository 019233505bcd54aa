"""A rank's place among ranks that add small messages in one launch, and the memory that it takes.

A rank's region has a flag for each program and rank, then two halves that take turns, each as large as the
largest message. A program of the kernel has a part of both halves to itself, whatever the message's size. It
counts its calls (``epochs``): the count is the flag's value, and its parity names the half. So a rank can be
one call ahead of another at most, writes to the half that no rank reads, and no flag is ever reset; a CUDA
graph can be replayed after any other one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: Larger messages are faster where each rank sends a part of its own to each other one, as NCCL does.
MAX_BYTES = 512 << 10
PROGRAM_BYTES = 4096  # of a message, that one program adds
PROGRAMS = MAX_BYTES // PROGRAM_BYTES
_FLAG_BYTES, _ALIGNED = 4, 256
_FAR_AHEAD = 1 << 30  # calls, of which a rank is never so many behind
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class OneShotPlace:
    """A rank's place among the ranks. ``addresses`` i64 [ranks]: of all regions, as this rank sees them;
    ``region`` u8: its own; ``epochs`` i32 [PROGRAMS]: calls that each program has made; ``keeps``: what owns
    the others' memory.
    """

    addresses: Tensor
    region: Tensor
    epochs: Tensor
    rank: int
    keeps: object = None

    @classmethod
    def of(cls, addresses: Sequence[int], rank: int, region: Tensor, keeps: object = None) -> "OneShotPlace":
        """At regions of zeros, before the first call."""
        device = region.device
        return cls(
            torch.tensor(addresses, dtype=torch.int64, device=device),
            region,
            torch.zeros(PROGRAMS, dtype=torch.int32, device=device),
            rank,
            keeps,
        )

    @property
    def flags(self) -> Tensor:
        """i32 [PROGRAMS, ranks]: the calls that each program of each rank has announced to this one."""
        ranks = self.addresses.shape[0]
        return self.region[: PROGRAMS * ranks * _FLAG_BYTES].view(torch.int32).view(PROGRAMS, ranks)

    def release(self) -> None:
        """End the calls of this rank that wait for others, which may be gone; their sums mean nothing."""
        stream = torch.cuda.Stream(self.region.device) if self.region.is_cuda else None
        with torch.cuda.stream(stream):  # beside the one on which the kernel waits
            self.flags.copy_((self.epochs + _FAR_AHEAD)[:, None])


def one_shot_region_bytes(ranks: int) -> int:
    """Bytes of one rank's region."""
    return flags_bytes(ranks) + 2 * MAX_BYTES


def flags_bytes(ranks: int) -> int:
    """Bytes of the flags at the start of a region."""
    return -(-PROGRAMS * ranks * _FLAG_BYTES // _ALIGNED) * _ALIGNED


def can_one_shot(part: Tensor) -> bool:
    """Whether the message is small enough."""
    return part.nbytes <= MAX_BYTES and part.dtype in _DTYPES
