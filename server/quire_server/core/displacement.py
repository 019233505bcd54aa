"""Preemption by priority: who has to go so that the first waiting sequence can run.

Called by the scheduler before each step. Only a higher priority takes a place: an earlier arrival, or a
shorter job, is no reason to compute anything twice. It takes places only from those behind it in an order
that never changes, so two sequences can never displace each other in turn.
"""

from collections import Counter

from quire_server.core.kv_manager import KVManager
from quire_server.core.limits import Batching, SchedulerConfig
from quire_server.core.policy import TOP_PRIORITY, Policy
from quire_server.core.running import Running
from quire_server.core.sequence import Sequence


def may_interrupt(waiting: Sequence, config: SchedulerConfig) -> bool:
    """Whether it need not wait for those behind it to end, or to come to the end of their prompts."""
    is_urgent = config.policy is Policy.PRIORITY or waiting.request.priority == TOP_PRIORITY
    return is_urgent and config.batching is not Batching.STATIC


def victims(first: Sequence, running: Running, kv: KVManager, config: SchedulerConfig) -> list[Sequence]:
    """The fewest, from behind, whose row and blocks let ``first`` run in this step; none if that cannot be.

    Whoever stays may need a block for its next token in this very step: those are not to be had.
    """
    if not may_interrupt(first, config):
        return []
    going, given_back, num_reclaimed, match = list[Sequence](), Counter[int](), 0, None
    for last in reversed(running.sequences):
        if last.order < first.order or last.request.priority <= first.request.priority:
            return []
        if match is None:
            if (match := kv.match(first)) is None:
                return []  # a part of its prefix is on its way from the disk
            num_growing = sum(_grows(sequence) for sequence in running.sequences)
        has_row = going or not running.is_full
        if has_row and kv.fits(match, alone=False, reclaimed=num_reclaimed - num_growing):
            break
        going.append(last)
        num_growing -= _grows(last)
        num_reclaimed += kv.reclaimable(last, given_back, match)
    staying = running.sequences[: len(running.sequences) - len(going)]
    wanted = sum(_wanted(sequence, first) for sequence in staying)
    return going if wanted < config.token_budget else []  # a row without a turn is no help


def _wanted(running: Sequence, first: Sequence) -> int:
    """Tokens that it gets before ``first``: chunks of those behind that one come after it."""
    lacking = len(running.tokens) - running.num_computed
    return lacking if lacking == 1 or running.order < first.order else 0


def _grows(sequence: Sequence) -> bool:
    """Whether its next token needs a block more."""
    return sequence.num_computed == sequence.capacity
