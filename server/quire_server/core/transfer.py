"""Prefill and decode apart: states of a transfer on both sides, references, leases of held blocks.

A producer computes the KV blocks of a prefix and *holds* them: nothing overwrites them until they were read,
were given up, or their lease ends. The consumer that asked for them gets a reference, reads the blocks, and
uses them once the producer has confirmed, after the last byte, that they were still held. Times are passed
in. Knows no sockets, tensors or scheduler.
"""

from __future__ import annotations

import enum
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quire_server.core.block_hash import BlockHashChain

_BYTES_PER_SECOND = 100e6  # the slowest transfer that is waited for
_SETUP_SECONDS = 2.0
ID_BYTES, DIGEST_BYTES = 16, 32


class TransferError(Exception):
    """A transfer that cannot go on: the consumer computes the prompt itself."""


class RefusedError(TransferError):
    """The producer does not give these blocks, and is well."""


class Reference(NamedTuple):
    """Names held blocks. ``incarnation``: of the producer's process; ``generation``: random, of one hold;
    ``prefix``: digest of all tokens and of the cache salt, so that it never names another prompt's blocks.
    """

    incarnation: bytes
    generation: bytes
    prefix: bytes
    num_blocks: int


class TransferState(enum.Enum):
    """A transfer on the side of the consumer; TRANSFERS has the allowed changes."""

    QUEUED = "queued"  # the producer computes, or this side has no room yet
    RESERVED = "reserved"  # this side has blocks for what comes
    READING = "reading"
    VERIFIED = "verified"  # every block is here, has its checksum, and was held until the end
    RUNNING = "running"  # the scheduler has the request, and finds the prefix in its cache
    LOCAL_PREFILL = "local prefill"  # the scheduler has the request, and computes all of it
    CANCELLING = "cancelling"  # the client is gone; the blocks stay until the reader has stopped
    FREED = "freed"


TRANSFERS = {
    TransferState.QUEUED: {TransferState.RESERVED, TransferState.LOCAL_PREFILL, TransferState.FREED},
    TransferState.RESERVED: {TransferState.READING, TransferState.LOCAL_PREFILL, TransferState.FREED},
    TransferState.READING: {
        TransferState.VERIFIED,
        TransferState.LOCAL_PREFILL,
        TransferState.CANCELLING,
    },
    TransferState.VERIFIED: {TransferState.RUNNING, TransferState.FREED},
    TransferState.CANCELLING: {TransferState.FREED},
    TransferState.RUNNING: set[TransferState](),
    TransferState.LOCAL_PREFILL: set[TransferState](),
    TransferState.FREED: set[TransferState](),
}


def changed(state: TransferState, to: TransferState) -> TransferState:
    """The next state; a change that the table does not have is a bug of this side."""
    assert to in TRANSFERS[state], (state, to)
    return to


def prefix_blocks(num_tokens: int, block_size: int) -> int:
    """How many blocks of a prompt can come from elsewhere: all full ones, without the last token, whose
    logits this side needs.
    """
    return (num_tokens - 1) // block_size


def prefix_digest(tokens: Sequence[int], salt: str, block_size: int) -> bytes:
    """The identity of whole blocks of tokens under a cache salt."""
    chain = BlockHashChain(salt)
    chain.extend(tokens, len(tokens) // block_size, block_size)
    return chain.digests[-1]


def read_seconds(num_bytes: int) -> float:
    """How long reading may take: a frozen peer or a cut link gives no error."""
    return num_bytes / _BYTES_PER_SECOND + _SETUP_SECONDS


class HoldState(enum.Enum):
    """What became of held blocks. Only the first one may be read."""

    HELD = "held"
    READ = "read"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


@dataclass(slots=True)
class Hold:
    """Blocks that a producer keeps for one reader."""

    reference: Reference
    block_ids: tuple[int, ...]
    expires_at: float
    state: HoldState = HoldState.HELD


class Holds:
    """The holds of one producer, by their generation. An ended one is forgotten once its blocks are taken."""

    def __init__(self, incarnation: bytes, lease_seconds: float) -> None:
        self.incarnation = incarnation
        self.lease_seconds = lease_seconds
        self._holds: dict[bytes, Hold] = {}

    def __len__(self) -> int:
        return len(self._holds)

    def add(self, generation: bytes, prefix: bytes, block_ids: Sequence[int], now: float) -> Reference:
        """Hold blocks from now on."""
        reference = Reference(self.incarnation, generation, prefix, len(block_ids))
        self._holds[generation] = Hold(reference, tuple(block_ids), now + self.lease_seconds)
        return reference

    def readable(self, reference: Reference, first: int, now: float) -> tuple[int, ...]:
        """The held blocks from index ``first`` on. Raises TransferError for a reference that names none."""
        hold = self._live(reference, now)
        if not 0 <= first < len(hold.block_ids):
            raise TransferError("the reference has no such blocks")
        return hold.block_ids[first:]

    def confirm(self, reference: Reference, now: float) -> None:
        """The blocks were read while they were held, and are read no more. Raises TransferError otherwise."""
        self._live(reference, now).state = HoldState.READ

    def cancel(self, generation: bytes) -> None:
        """The reader has gone; without effect on a hold that has ended."""
        hold = self._holds.get(generation)
        if hold is not None and hold.state is HoldState.HELD:
            hold.state = HoldState.CANCELLED

    def take_ended(self, now: float) -> list[Hold]:
        """Holds that ended, whose blocks are to be freed; each once. All leases are looked at: they are in
        no order.
        """
        for hold in self._holds.values():
            if hold.state is HoldState.HELD and now >= hold.expires_at:
                hold.state = HoldState.EXPIRED
        ended = [hold for hold in self._holds.values() if hold.state is not HoldState.HELD]
        for hold in ended:
            del self._holds[hold.reference.generation]
        return ended

    def _live(self, reference: Reference, now: float) -> Hold:
        if reference.incarnation != self.incarnation:
            raise TransferError("the reference is of another process")
        hold = self._holds.get(reference.generation)
        if hold is None or not hmac.compare_digest(hold.reference.prefix, reference.prefix):
            raise TransferError("nothing is held under this reference")
        if hold.reference != reference or hold.state is not HoldState.HELD or now >= hold.expires_at:
            raise TransferError("what the reference named is no longer held")
        return hold
