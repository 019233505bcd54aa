"""Which waiting sequences wait for the prompt of a running one, because it computes what they lack.

Equal prompts that come together, as the answers of one request or a burst with one long start, would all be
computed in the same step, before the first one is in the prefix cache. Computed once, the others find its
full blocks there, and compute what is left of their own. Knows neither budgets nor free blocks.
"""

from bisect import bisect_left
from collections.abc import Iterable

from quire_server.core.sequence import Sequence, Status


class Leaders:
    """Running sequences by the next full block of their prompt that they will publish. ``running``: in their
    order; of those with the same block the first one leads.
    """

    def __init__(self, running: Iterable[Sequence]) -> None:
        self._by_digest: dict[bytes, Sequence] = {}
        for sequence in running:
            self.add(sequence)

    def add(self, sequence: Sequence) -> None:
        """One that starts."""
        digests = sequence.block_hashes.digests
        if sequence.num_published < len(digests):
            self._by_digest.setdefault(digests[sequence.num_published], sequence)

    def follow(self, sequence: Sequence, num_cached: int, block_size: int) -> bool:
        """Whether a waiting sequence, with so many tokens cached, is to wait: for one before it in the order
        that will publish at least half of the tokens that it lacks.
        """
        digests, first = sequence.block_hashes.digests, num_cached // block_size
        leader = self._by_digest.get(digests[first]) if first < len(digests) else None
        if leader is None or leader.order > sequence.order:
            return False
        num_shared = _num_shared(digests, leader.block_hashes.digests)
        if 2 * (num_shared * block_size - num_cached) < len(sequence.tokens) - num_cached:
            return False
        sequence.leader, sequence.num_shared_blocks = leader, num_shared
        return True


def is_following(sequence: Sequence) -> bool:
    """Whether its leader still computes what the sequence waits for. One that was preempted does not."""
    leader = sequence.leader
    if leader is None:
        return False
    if leader.status is Status.RUNNING and leader.num_published < sequence.num_shared_blocks:
        return True
    sequence.leader, sequence.num_shared_blocks = None, 0
    return False


def _num_shared(digests: list[bytes], others: list[bytes]) -> int:
    """How many leading blocks are the same: each digest is one of the whole prefix."""
    both = range(min(len(digests), len(others)))
    return bisect_left(both, True, key=lambda index: digests[index] != others[index])
