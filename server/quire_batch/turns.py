"""Whose batch is first: clients take turns, and then the batches of each, so that a client with many batches
has no more of a worker than one with a single job. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TypeVar

from quire_batch.records import Running

_Item = TypeVar("_Item")


def in_turns(running: Sequence[Running], turn: int) -> list[Running]:
    """One of each client, then a second one of each, and so on. ``turn``: a number that grows by one."""
    by_owner: dict[str, list[Running]] = {}
    for one in running:
        by_owner.setdefault(one.owner, []).append(one)
    owners = _rotated(list(by_owner), turn)
    rounds = [_rotated(by_owner[owner], turn // len(owners)) for owner in owners]
    return [one for each in zip_longest(*rounds) for one in each if one is not None]


def _rotated(items: list[_Item], by: int) -> list[_Item]:
    begin = by % len(items) if items else 0
    return [*items[begin:], *items[:begin]]
