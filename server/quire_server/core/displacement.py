"""Preemption by priority: who has to go so that the first waiting sequence can run.

Called by the scheduler before each step. Only a higher priority takes a place: an earlier arrival, or a
shorter job, is no reason to compute anything twice. It takes places only from those behind it in an order
that never changes, so two sequences can never displace each other in turn.
"""

from quire_server.core.kv_manager import KVManager
from quire_server.core.limits import Batching, SchedulerConfig
from quire_server.core.policy import TOP_PRIORITY, Policy
from quire_server.core.running import Running
from quire_server.core.sequence import Sequence


def victims(first: Sequence, running: Running, kv: KVManager, config: SchedulerConfig) -> list[Sequence]:
    """The fewest, from behind, whose row and blocks let ``first`` run in this step; none if that cannot be.

    Blocks that victims share with others count as theirs; where that was too hopeful, the next step finds
    the rest.
    """
    is_urgent = config.policy is Policy.PRIORITY or first.request.priority == TOP_PRIORITY
    if not is_urgent or config.batching is Batching.STATIC:
        return []
    going, num_reclaimed, match = list[Sequence](), 0, None
    for last in reversed(running.sequences):
        if last.order < first.order or last.request.priority <= first.request.priority:
            return []
        if (match := match or kv.match(first)) is None:
            return []  # a part of its prefix is on its way from the disk
        if (going or not running.is_full) and kv.fits(match, alone=False, reclaimed=num_reclaimed):
            break
        going.append(last)
        num_reclaimed += len(last.block_ids)
    staying = running.sequences[: len(running.sequences) - len(going)]
    wanted = sum(len(sequence.tokens) - sequence.num_computed for sequence in staying)
    return going if wanted < config.token_budget else []  # a row without a turn is no help
