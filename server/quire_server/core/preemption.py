"""Preemption by priority: which running sequences have to go so that the first waiting one can run.

Only a higher priority preempts: an earlier arrival or a shorter job is no reason to compute tokens twice.
Victims are always behind the waiting sequence in an order that never changes, so two sequences can never
preempt each other in turn. (Preemption for lack of KV blocks is in ``scheduler``.)
"""

from collections import Counter

from quire_server.core.config import Batching, SchedulerConfig
from quire_server.core.kv_cache_manager import KVCacheManager
from quire_server.core.policy import TOP_PRIORITY, Policy
from quire_server.core.request_queue import RunningQueue
from quire_server.core.sequence import Sequence


def may_interrupt(waiting: Sequence, config: SchedulerConfig) -> bool:
    """Whether a waiting sequence may preempt running ones behind it, and go before their prefill chunks."""
    is_urgent = config.policy is Policy.PRIORITY or waiting.request.priority == TOP_PRIORITY
    return is_urgent and config.batching is not Batching.STATIC


def victims(
    first: Sequence, running: RunningQueue, kv: KVCacheManager, config: SchedulerConfig
) -> list[Sequence]:
    """The fewest sequences, from the end of the queue, whose rows and blocks let ``first`` run in this step;
    none where that is impossible. Blocks that the remaining sequences need for their next token are left to
    them.
    """
    if not may_interrupt(first, config):
        return []
    chosen, released, num_reclaimed, match = list[Sequence](), Counter[int](), 0, None
    for last in reversed(running.sequences):
        if last.order < first.order or last.request.priority <= first.request.priority:
            return []
        if match is None:
            if (match := kv.match(first)) is None:
                return []  # a part of its prefix is being read from the disk
            num_growing = sum(_needs_block(sequence) for sequence in running.sequences)
        has_row = chosen or not running.is_full
        if has_row and kv.fits(match, is_alone=False, num_reclaimed=num_reclaimed - num_growing):
            break
        chosen.append(last)
        num_growing -= _needs_block(last)
        num_reclaimed += kv.num_reclaimable(last, released, match)
    remaining = running.sequences[: len(running.sequences) - len(chosen)]
    num_tokens_before = sum(_num_tokens_before(sequence, first) for sequence in remaining)
    # Without budget in this step the row would be of no use.
    return chosen if num_tokens_before < config.token_budget else []


def _num_tokens_before(running: Sequence, first: Sequence) -> int:
    """Tokens of a running sequence that are scheduled before ``first``: decodes, and chunks in front of
    it.
    """
    num_missing = len(running.tokens) - running.num_computed
    return num_missing if num_missing == 1 or running.order < first.order else 0


def _needs_block(sequence: Sequence) -> bool:
    """Whether the next token needs a new block."""
    return sequence.num_computed == sequence.capacity
