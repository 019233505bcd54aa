"""Slots of a pipeline: which running requests are computed together while other steps are in flight.

With p stages there are p slots, so that each stage can compute the step of another slot. A slot holds the
requests that it ran last; a request is in one slot and so in at most one step in flight. Slots are kept even,
because the largest one decides how long a stage takes: new requests go to the slot with the fewest tokens,
and a slot has at most its share of the decodes (vLLM assigns by time of admission, and its groups drift
apart). Pure decisions: knows no requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire_server.core.config import SchedulerConfig


@dataclass(frozen=True, slots=True)
class SlotLoad:
    """What the next step of a slot has to compute. ``is_in_flight``: its last step is not committed yet."""

    decodes: int  # requests that lack one token
    tokens: int  # of all its requests
    is_in_flight: bool


def why_idle(config: SchedulerConfig) -> str:
    """Why stages will be idle whatever the load, with the remedy; empty where nothing keeps them idle."""
    stages, streams = config.pipeline_size, config.max_num_seqs
    if config.num_slots < stages:
        return (
            f"one step is in flight with drafts, an offload tier or static batching, so {stages} stages take "
            "turns: leave these out, or set --pipeline-parallel-size to 1"
        )
    if streams < stages:
        return (
            f"--max-num-seqs {streams} keeps at most {streams} of {stages} stages busy: raise it, or set "
            f"--pipeline-parallel-size to {streams}"
        )
    return ""


def candidates(loads: Sequence[SlotLoad], previous: int) -> list[int]:
    """The slots of which a step can be scheduled, the best one first: those that have something to compute,
    in turn after the ``previous`` one, then empty ones, which only new requests can fill.
    """
    count = len(loads)
    in_turn = [(previous + 1 + offset) % count for offset in range(count)]
    free = [slot for slot in in_turn if not loads[slot].is_in_flight]
    return sorted(free, key=lambda slot: loads[slot].tokens == 0)


def admission_limit(loads: Sequence[SlotLoad], slot: int) -> int:
    """The number of tokens up to which new requests go to this slot: those of the emptiest other one."""
    return min(load.tokens for index, load in enumerate(loads) if index != slot)


def moves(loads: Sequence[SlotLoad], slot: int) -> list[int]:
    """The slots to which the last decodes of this slot go, one each, so that it keeps its share of them."""
    decodes = [load.decodes for load in loads]
    share = -(-sum(decodes) // len(decodes))
    targets: list[int] = []
    while decodes[slot] > share:
        target = decodes.index(min(decodes))
        decodes[slot] -= 1
        decodes[target] += 1
        targets.append(target)
    return targets
