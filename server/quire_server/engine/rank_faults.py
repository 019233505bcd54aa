"""The injected faults of ranks: one of a divided model ends, stops or is slow at a pass. ``fault_injection``
has their names and options.
"""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import replace

from quire_server.engine.rank_channel import Identity
from quire_server.fault_injection import Faults

_EXIT_CODE = 3
_DELAYED_SHARE = 0.05  # of the two places of each pass


class RankFaults:
    """Those of one rank."""

    def __init__(self, faults: Faults, rank: int) -> None:
        self._faults, self._rank = faults, rank
        self._dice = random.Random(rank)

    def identity(self, own: Identity) -> Identity:
        """What the rank says of itself when it joins."""
        fault = self._faults.get("rank_revision")
        if fault is None or fault.rank != self._rank:
            return own
        self._faults.mark_injected("rank_revision")
        return replace(own, revision=f"not {own.revision}")

    def before_exchanges(self, number: int) -> None:
        """The pass of this number is known, and nothing is exchanged yet."""
        self._inject(number, is_late=False)

    def after_exchanges(self, number: int) -> None:
        """All is exchanged, and the pass not echoed yet."""
        self._inject(number, is_late=True)

    def _inject(self, number: int, *, is_late: bool) -> None:
        if self._is_due("rank_exit", number, is_late=is_late):
            os._exit(_EXIT_CODE)
        if self._is_due("rank_freeze", number, is_late=is_late):
            os.kill(os.getpid(), signal.SIGSTOP)
        delay = self._faults.get("rank_delay")
        if delay is None or delay.rank != self._rank or self._dice.random() >= _DELAYED_SHARE:
            return
        if self._faults.due("rank_delay", number):
            time.sleep(delay.seconds)

    def _is_due(self, name: str, number: int, *, is_late: bool) -> bool:
        fault = self._faults.get(name)
        if fault is None or (fault.rank, fault.late) != (self._rank, is_late):
            return False
        return self._faults.due(name, number)
